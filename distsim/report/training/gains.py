"""What a step would take if something were better, from what the ranks' steps were.

Each is an estimate from the same records, not another simulation: the mean step of the rank that paces the others, less
what would go (means less means: a median step has nothing of the checkpoints and evaluations that are in the means).
What is left is taken to stay as it is: bubbles and late ranks, which would shrink as well, and what is hidden so far,
which might come to light. No step is said to get shorter than the longest rank's kernels take alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distsim.sim.observe.metrics import Training

__all__ = ["Gain", "gains"]

FEWEST = 0.005
"""A smaller part of the step is not worth a line."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What would be better, and the step it would leave."""

    name: str
    how: str
    step_s: float


def gains(training: Training) -> list[Gain]:
    """The largest first; those that would change nothing are left out."""
    rank = training.pacing
    if rank is None or not training.step_time_s:
        return []
    moving_s = rank.exposed_s - rank.late_s
    faster_s = sum(wait.spared_s for wait in rank.waits)
    found = [
        ("ideal network", "no time, no SM, no memory bandwidth for it", moving_s + rank.slowed_s),
        ("ideal overlap", "what moves while nothing computes is hidden", moving_s),
        ("twice the bandwidth", "every call takes half the time", faster_s),
        ("no pipeline bubble", "no stage waits for another's message", rank.bubble_s),
        ("no stragglers", "all members of a collective come at once", rank.late_s),
        ("no host overhead", "all kernels are launched in time", rank.host_s),
    ]
    step_s = rank.step_s
    least_s = max(one.compute_s - one.slowed_s for one in training.ranks)
    kept = [Gain(name, how, max(least_s, step_s - less_s)) for name, how, less_s in found if less_s > FEWEST * step_s]
    return sorted(kept, key=lambda gain: gain.step_s)
