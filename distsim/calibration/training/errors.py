"""Published against simulated steps, and the bounds they are held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from distsim.calibration.training.intervals import Held, held, level, residuals_of
from distsim.calibration.training.runs import Run

__all__ = ["LARGEST", "MEDIANS", "MEMORY", "Summary", "summarise"]

MEDIANS = {"one node": 0.08, "many nodes": 0.12}
"""Median absolute error of the step, at most."""
LARGEST = 0.30
"""Absolute error of any step, at most."""
MEMORY = 0.10
"""Absolute error of any peak of memory, at most."""


@dataclass(frozen=True)
class Summary:
    """All rows together."""

    runs: Sequence[Run]
    medians: dict[str, float | None]
    """By "one node" and "many nodes"; None without a row."""
    memory: float | None
    """Median absolute error of the peaks that were published."""
    unseen: float | None
    """Median absolute error of the step of those that nobody looked at before; None without one."""
    held: Held | None
    """How well the intervals of left out sources hold their rows; None where all rows have one source."""
    broken: list[str]
    """Every bound that does not hold, in words."""

    def of(self, place: str) -> list[Run]:
        """The runs on one node, or on many."""
        return [run for run in self.runs if _place(run) == place]


def summarise(runs: Sequence[Run]) -> Summary:
    """Medians, and the bounds that are broken: a row that did not run breaks one."""
    broken = [f"{run.row.name}: it did not run: {run.failure}" for run in runs if run.failure]
    medians: dict[str, float | None] = {}
    for place, bound in MEDIANS.items():
        errors = [abs(run.step_error) for run in runs if _place(run) == place and run.step_error is not None]
        found = medians[place] = median(errors) if errors else None
        if found is not None and found > bound:
            broken.append(f"the step on {place}: median error {found:.1%}, at most {bound:.0%}")
    for run in runs:
        if run.step_error is not None and abs(run.step_error) > LARGEST:
            broken.append(f"{run.row.name}: the step is {run.step_error:+.1%} off, at most {LARGEST:.0%}")
        if run.memory_error is not None and abs(run.memory_error) > MEMORY:
            broken.append(f"{run.row.name}: memory is {run.memory_error:+.1%} off, at most {MEMORY:.0%}")
    memory = [abs(run.memory_error) for run in runs if run.memory_error is not None]
    unseen = [abs(run.step_error) for run in runs if run.row.unseen and run.step_error is not None]
    residuals = residuals_of(runs)
    several = len({one.source for one in residuals}) > 1
    return Summary(
        runs,
        medians,
        median(memory) if memory else None,
        median(unseen) if unseen else None,
        held(residuals, level(residuals)) if several else None,
        broken,
    )


def _place(run: Run) -> str:
    return "one node" if run.row.num_nodes == 1 else "many nodes"
