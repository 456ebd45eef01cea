"""What the pytest plugin does once a test asks for it; `distsim.pytest_plugin` is the door.

`markers.py` says which tests are ours. `body.py` is what pytest calls instead of one; `run_sim.py` and `run_gloo.py`
run it on ranks (`on_rank`: what each rank has of its own); `verdict.py` judges.
"""

from __future__ import annotations

__all__ = [
    "annotations",
    "body",
    "markers",
    "on_rank",
    "options",
    "run_gloo",
    "run_sim",
    "scenario_item",
    "terminal",
    "timeouts",
    "tools",
    "verdict",
]
