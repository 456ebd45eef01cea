"""What the faults that last have in common: a time from which on they are at work, and one at which they are over."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from distsim.debug.records import CallRecord
from distsim.sim.faults.fault import Fault, Rule

if TYPE_CHECKING:
    from distsim.sim.isolation.process import RankTask
    from distsim.sim.world import World

__all__ = ["Lasting"]

R = TypeVar("R", bound=Rule)


class Lasting(Fault[R]):
    """At work from its time on, or from the moment at which the first rank makes its call."""

    def __init__(self, rule: R, world: World, number: int) -> None:
        super().__init__(rule, world, number)
        self._from_s = rule.when.start_s if rule.when.call is None else math.inf

    def on_call(self, task: RankTask, record: CallRecord) -> None:
        when = self.rule.when
        if when.call is not None and self._from_s == math.inf and when.call.matches(record):
            self._from_s = task.now_s() + when.after_s

    @property
    def until_s(self) -> float:
        """When it is over; infinite where it stays, or has not begun."""
        return math.inf if self.rule.when.for_s is None else self._from_s + self.rule.when.for_s

    def active(self, now_s: float) -> bool:
        """Whether it is at work at *now_s* of the rank's own clock, which is ahead of the world's while it computes."""
        return self._from_s <= now_s < self.until_s
