"""Steps of a job from the turns of a group: a matrix of own work by member and step.

A step ends with the rarest of the collectives that return regularly. Collectives that are rarer than a fifth of the one
before which the job spends most of its time (the barrier of a checkpoint, those of an evaluation) belong to no step,
and neither does the work before them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from distsim.debug.diagnosis.pace.turns import Bools, Floats, Ints, Turns

RARE = 5
"""How many times rarer than the main collective one has to be to belong to no step."""
LONG = (0.5, 0.65, 0.8)
"""Shares of the usual longest work (90th percentile). Work above one of them begins a step if it returns regularly:
equal calls may follow each other in a step, of which the first has the most work before it.
"""
REGULAR = 0.8
"""Share of equal distances between such turns from which they count as regular."""
ENOUGH = 20
"""Turns from which the collective that ends a step is chosen."""
AGAIN = 4
"""The choice is repeated when this many times more turns are known."""
MOST_TURNS = 2048
"""Number of turns that are kept."""


@dataclass(frozen=True)
class WorkSteps:
    """Consecutive steps."""

    work_s: Floats
    """Own work, shape (members, steps)."""
    moved_s: Floats
    """Time of transfers after the last arrival, shape (steps,); NaN if it is not known."""
    length_s: Floats
    """From the end of the previous step to the end of this one, shape (steps,)."""


@dataclass
class StepCutter:
    """Collects the turns of one group and cuts them into steps."""

    _turns: Turns | None = None
    _cut: int = 0
    """Number of kept turns that have been cut into steps."""
    _chosen_at: int = 0
    """Number of turns known when the collective that ends a step was chosen."""
    _seen: int = 0
    end: int = -1
    """Key of the collective that ends a step, with whether it has much work before it; -1 before it is chosen."""
    _regular: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    _border_s: float = 0.0
    """Work from which a turn counts as another than one of the same key with little work; 0: all are alike."""

    def add(self, turns: Turns) -> tuple[WorkSteps | None, bool]:
        """Take further turns. Return the steps that are now complete, and whether all earlier ones are void."""
        self._turns = turns if self._turns is None else _joined(self._turns, turns)
        self._seen += len(turns.seq)
        dropped = max(0, len(self._turns.seq) - MOST_TURNS)
        self._turns = _part(self._turns, slice(dropped, None))
        self._cut = max(0, self._cut - dropped)
        is_new = False
        if self._seen >= max(ENOUGH, AGAIN * self._chosen_at):
            is_new = self._choose(self._turns)
        return self._steps(self._turns), is_new

    def _choose(self, turns: Turns) -> bool:
        """Choose the collectives of a step. Return whether the choice is another one."""
        before = self.end, self._regular.tolist(), self._border_s > 0.0
        self._chosen_at = self._seen
        least = turns.work_s.min(axis=0)
        borders_s = np.percentile(least, 90) * np.array(LONG)
        self._border_s = next((float(border_s) for border_s in borders_s if _is_regular(least >= border_s)), 0.0)
        kinds, inverse, counts = np.unique(self._kinds(turns), return_inverse=True, return_counts=True)
        spent = np.bincount(inverse, np.diff(turns.at_s, prepend=turns.at_s[0]))
        regular = counts * RARE >= counts[np.argmax(spent)]
        self._regular = kinds[regular]
        self.end = int(self._regular[np.lexsort((-spent[regular], counts[regular]))[0]])
        if before == (self.end, self._regular.tolist(), self._border_s > 0.0):
            return False
        self._cut = 0
        return True

    def _kinds(self, turns: Turns) -> Ints:
        is_long = turns.work_s.min(axis=0) >= self._border_s if self._border_s else np.zeros(len(turns.key), bool)
        kinds: Ints = (turns.key & ~1) | is_long
        return kinds

    def _steps(self, turns: Turns) -> WorkSteps | None:
        if self.end == -1:
            return None
        rest = slice(self._cut, None)
        kinds = self._kinds(turns)[rest]
        ends = np.flatnonzero(kinds == self.end)
        if len(ends) < 2:
            return None
        values = np.vstack((turns.work_s[:, rest], turns.moved_s[rest]))
        values = np.where(np.isin(kinds, self._regular), values, 0.0)[:, 1 + int(ends[0]) : 1 + int(ends[-1])]
        sums = np.add.reduceat(values, ends[:-1] - ends[0], axis=1)
        self._cut += int(ends[-1])  # the last end stays: the next step begins there
        return WorkSteps(sums[:-1], sums[-1], np.diff(turns.at_s[rest][ends]))


def _is_regular(is_long: Bools) -> bool:
    """Return whether the marked turns are equally far from each other, with others in between."""
    distances = np.diff(np.flatnonzero(is_long))
    if len(distances) < 3:
        return False
    values, counts = np.unique(distances, return_counts=True)
    return bool(values[np.argmax(counts)] > 1 and counts.max() >= REGULAR * len(distances))


def _joined(before: Turns, after: Turns) -> Turns:
    names = [one.name for one in fields(Turns)]
    return Turns(*(np.concatenate((getattr(before, name), getattr(after, name)), axis=-1) for name in names))


def _part(turns: Turns, part: slice) -> Turns:
    return Turns(*(getattr(turns, one.name)[..., part] for one in fields(Turns)))
