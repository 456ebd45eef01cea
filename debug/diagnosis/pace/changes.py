"""Pauses with a period, and steps or transfers that have become longer.

From the same matrix of own work by rank and step as in `statistic.py`, and the length and the transfers of each step.
None of these accuses a rank: they are facts, of which some are meant so (a checkpoint).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distsim.debug.diagnosis.pace.statistic import CERTAINTY, StepHistory, excess, standard_errors
from distsim.debug.diagnosis.pace.turns import Floats

STARTUP = 20
"""First steps of a job, which are not examined: they compile, allocate and fill caches."""
PAUSE_SHARES = (1 / 50, 0.3)
"""Smallest and largest share of steps that are pauses."""
PAUSES = 5
EQUAL = 0.1
"""Relative difference up to which two distances between pauses are equal."""
REGULAR = 0.8
"""Share of equal distances from which pauses have a period."""
PAUSE_COST = 0.03
"""Smallest share of the time that pauses cost to be worth a word."""
SPREADS = 6.0
"""Spreads of a rank's excess by which a pause stands out."""
LONGER = 0.05
"""Smallest share by which steps, or transfers as a share of a step, have become longer to be worth a word."""
SIDE = 40
"""Smallest number of steps before and after a change."""


@dataclass(frozen=True)
class Pause:
    """A rank that keeps the others waiting for long in each n-th step."""

    rank: int
    every: int
    """Distance of two pauses in steps."""
    pause_s: float
    share: float
    """Share of the time that the pauses cost."""


@dataclass(frozen=True)
class StepChange:
    """Steps that take longer from some step on."""

    since_step: int
    before_s: float
    after_s: float


def pauses(history: StepHistory) -> list[Pause]:
    """Return the ranks whose work is much longer in each n-th step, with the distance of these steps."""
    work_s, length_s, first = history.matrix()
    skipped = max(0, STARTUP - first)
    work_s, length_s = work_s[:, skipped:], length_s[skipped:]
    steps = work_s.shape[1]
    if steps < SIDE:
        return []
    own, step_s = excess(work_s), float(np.median(length_s))
    middle = np.median(own, axis=1)
    spread = 1.4826 * np.median(np.abs(own - middle[:, None]), axis=1)
    regular = []
    for row, rank in enumerate(history.ranks):
        longer = own[row] - middle[row]
        at = np.flatnonzero(longer > max(step_s / 2, SPREADS * spread[row]))
        if len(at) < PAUSES or not PAUSE_SHARES[0] <= len(at) / steps <= PAUSE_SHARES[1]:
            continue
        distances = np.diff(at)
        every = float(np.median(distances))
        pause_s = float(np.median(longer[at]))
        share = pause_s * len(at) / float(length_s.sum())
        is_regular = (np.abs(distances - every) <= EQUAL * every).mean() >= REGULAR
        if every > 1 and is_regular and share > PAUSE_COST:
            regular.append(Pause(rank, round(every), pause_s, share))
    return regular


def longer_since(values_s: Floats, least_s: float, first: int = 0) -> StepChange | None:
    """Return since when the values are larger than before, or None if they are not for certain.

    Args:
        values_s: Seconds of each step, shape (steps,).
        least_s: Smallest difference in seconds that counts.
        first: Number of steps before the first value.
    """
    skipped = max(0, STARTUP - first)
    values = values_s[skipped:]
    if len(values) < 2 * SIDE or not np.isfinite(values).all():
        return None
    best, split = 0.0, 0
    for at in range(SIDE, len(values) - SIDE + 1, 5):
        difference = float(np.median(values[at:]) - np.median(values[:at]))
        weighed = difference * (at * (len(values) - at)) ** 0.5
        if weighed > best:
            best, split = weighed, at
    if not split:
        return None
    before, after = values[:split], values[split:]
    difference = float(np.median(after) - np.median(before))
    error = float(np.hypot(*(standard_errors(side[None, :])[0] for side in (before, after))))
    # The lower tenth must rise, too: a few long steps more are no change of all.
    rises = np.percentile(after, 10) - np.percentile(before, 10) > difference / 2
    if difference <= least_s or not rises or difference <= CERTAINTY * error:
        return None
    return StepChange(first + skipped + split + 1, float(np.median(before)), float(np.median(after)))
