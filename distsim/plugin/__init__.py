"""The part of the pytest plugin that is loaded when a test needs it; `distsim.pytest_plugin` is its entry point.

`body.py` decides which tests are ours and replaces their bodies; `run_sim.py` and `run_gloo.py` run a body on ranks
(`on_rank.py`, with each rank's own objects: `fixtures.py`); `verdict.py` judges;
`explore.py` runs a test in every order of its operations.
"""

from __future__ import annotations

__all__ = [
    "annotations",
    "body",
    "explore",
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
