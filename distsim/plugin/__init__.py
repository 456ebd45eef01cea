"""What the pytest plugin does once a test asks for it; `distsim.pytest_plugin` is the door.

`body.py` is what pytest calls instead of a test; `run_sim.py` and `run_gloo.py` run it on ranks; `verdict.py` judges.
"""

from __future__ import annotations

__all__ = [
    "annotations",
    "body",
    "options",
    "rank_body",
    "rank_report",
    "run_gloo",
    "run_sim",
    "scenario_item",
    "shared_fixtures",
    "terminal",
    "timeouts",
    "verdict",
]
