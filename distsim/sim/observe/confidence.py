"""Intervals of a run's times, from those of its collectives (collectives/uncertainty.py).

Errors of calls alike are the model's, not chance: they are added up, not averaged out. A step's interval is that of the
communication which nothing hides on the rank that paces the others, and of published steps (step_errors.py), which has
the errors of operators, of the host and of what is taken to be hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distsim.collectives.uncertainty import LAUNCH_BOUND, Interval, interval, size_class, step_error
from distsim.debug.records import CallRecord
from distsim.debug.records.call_log import CallSum
from distsim.sim.observe.metrics import Training
from distsim.sim.outcome import CollectiveTotal

if TYPE_CHECKING:
    from distsim.sim.c10d.group.questions import Questions
    from distsim.sim.world import World

__all__ = ["LAUNCH_BOUND", "Confidence", "step_error", "step_interval"]


UNMEASURED = 0.01
"""Of a step, that communication nobody measured may take of it before its interval says nothing."""


class Confidence:
    """Of the calls of one world."""

    def __init__(self, world: World, nccl_version: str | None) -> None:
        self._world = world
        self.is_known = nccl_version != "ideal"
        """Whether its times are of a machine that one could measure."""
        self._nodes: dict[tuple[str, int | None, int | None], int] = {}
        self._factors: dict[tuple[int, str, str, str], tuple[float, float] | None] = {}

    def of(self, sums: Sequence[CallSum], group: Questions | None) -> tuple[float, float] | None:
        """(low_s, high_s) of all these calls of *group* together; None where one is of a kind that nobody measured."""
        if group is None:
            return None
        low_s = high_s = 0.0
        for alike in sums:
            factors = self._of_one(alike.first, group.flavour_on(alike.first.device))
            if factors is None:
                return None
            low_s += factors[0] * alike.time_s
            high_s += factors[1] * alike.time_s
        return low_s, high_s

    def _of_one(self, record: CallRecord, flavour: str) -> tuple[float, float] | None:
        ends = (record.rank, record.peer) if record.is_p2p else (None, None)
        members = (record.group.name, *ends)
        nodes = self._nodes.get(members)
        if nodes is None:
            slots = self._world.slots
            nodes = self._nodes[members] = len({slots[rank].host for rank in record.members})
        key = (nodes, size_class(record.nbytes), flavour, record.op)
        if key not in self._factors:
            found = self._interval(record, nodes, flavour)
            self._factors[key] = None if found is None else (found.low_s, found.high_s)
        return self._factors[key]

    def _interval(self, record: CallRecord, nodes: int, flavour: str) -> Interval | None:
        return interval(self._world.cluster, record.nbytes, nodes, 1.0, flavour, record.op) if self.is_known else None


def step_interval(training: Training, totals: Sequence[CollectiveTotal]) -> tuple[float, float] | None:
    """(low_s, high_s) of a step; None without a step, or where nothing hides communication that nobody measured.

    The errors of its exposed communication and those of published steps of its regime have nothing to do with each
    other: their squares are added.
    """
    rank = training.pacing
    if rank is None or not training.step_time_s or training.step_regime is None:
        return None
    known = step_error(training.step_regime)
    sums: dict[tuple[str, str], list[float]] = {}
    unmeasured = {(total.op, total.group) for total in totals if total.low_s is None}
    if sum(wait.moving_s for wait in rank.waits if (wait.op, wait.group) in unmeasured) > UNMEASURED * rank.step_s:
        return None
    for total in totals:
        summed = sums.setdefault((total.op, total.group), [0.0, 0.0, 0.0])
        low_s, high_s = (total.low_s, total.high_s) if total.low_s is not None else (total.time_s, total.time_s)
        for place, seconds in enumerate((total.time_s, low_s, high_s or 0.0)):
            summed[place] += seconds
    low_s = high_s = training.step_time_s
    for wait in rank.waits:
        # A receive is timed as the send that it waits for.
        time_s, low, high = sums.get((wait.op, wait.group)) or sums.get(("send", wait.group)) or (0.0, 0.0, 0.0)
        if time_s > 0.0:
            low_s -= wait.moving_s * (1.0 - low / time_s)
            high_s += wait.moving_s * (high / time_s - 1.0)
    step_s = training.step_time_s
    return (
        max(0.0, step_s - math.hypot(step_s - low_s, step_s * (1.0 - known.low))),
        step_s + math.hypot(high_s - step_s, step_s * (known.high - 1.0)),
    )
