"""What the pytest plugin does once a test asks for it; `distsim.pytest_plugin` is the door.

`body.py` says which tests are ours, and is what pytest calls instead of one; `run_sim.py` and `run_gloo.py` run it on
ranks (`on_rank.py`, with what each rank has of its own: `fixtures.py`); `verdict.py` judges.
"""

from __future__ import annotations

__all__ = [
    "annotations",
    "body",
    "fixtures",
    "hypothesis",
    "on_rank",
    "options",
    "run_gloo",
    "run_sim",
    "sim_fixtures",
    "terminal",
    "timeouts",
    "verdict",
]
