"""How far a measured training step lies from a simulated one: what published steps say, by regime.

A regime is what the errors go by: how much of the step the host needs to launch its kernels, and else one node or many.
The spreads are `step_errors.toml` in distsim/calibration/training, made by `python -m tests.benchmarks.step_errors`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache

from distsim.calibration.constants import data_folder

__all__ = ["LAUNCH_BOUND", "MANY_NODES", "ONE_NODE", "StepError", "regime_of", "step_error"]

ONE_NODE, MANY_NODES, LAUNCH_BOUND = "one node", "many nodes", "near launch-bound"
LAUNCHES = 0.16
"""Of a step, that the host needs to launch its kernels: from here on module calls, hooks and logging, which are not in
an operator's price, may set the pace. Chosen with the rows of rows.csv in sight, at 0.10 when an operator was held to
cost the host 7.5 us beside an H100 and 9 beside an A100, and scaled with that: of eleven rows at or above it the median
step took 1.55 times as long as simulated then, of the others 1.03 times."""


@dataclass(frozen=True, slots=True)
class StepError:
    """Where eight of ten measured steps of a regime lie, as factors of the simulated one."""

    regime: str
    low: float
    high: float
    rows: int
    sources: int


def regime_of(launching_s: float, step_s: float, nodes: int) -> str:
    """The regime of a step on so many *nodes* whose kernels the host needs *launching_s* to launch."""
    if launching_s >= LAUNCHES * step_s:
        return LAUNCH_BOUND
    return ONE_NODE if nodes == 1 else MANY_NODES


@cache
def _step_errors() -> dict[str, StepError]:
    data = tomllib.loads((data_folder() / "training" / "step_errors.toml").read_text(encoding="utf-8"))
    return {regime: StepError(regime, **entry) for regime, entry in data.items()}


def step_error(regime: str) -> StepError:
    """The errors of *regime*."""
    return _step_errors()[regime]
