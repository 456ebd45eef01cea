"""`delay`: ranks that come late once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from distsim.debug.records import CallRecord
from distsim.sim.faults.ranks.rank_fault import RankFault, RankRule

if TYPE_CHECKING:
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.isolation.process import RankTask, SimProcess
    from distsim.sim.world import World

__all__ = ["Delay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay(RankRule):
    """Ranks that come late once."""

    delay_s: Annotated[float, Gt(0)]
    """By how much."""

    def __str__(self) -> str:
        return f"{self.who} delayed by {self.delay_s:g} s"

    def planted(self, world: World, number: int, links: LinkState) -> _Delay:
        return _Delay(self, world, number)


class _Delay(RankFault[Delay]):
    def inside(self, task: RankTask, record: CallRecord) -> None:
        task.sleep(self.rule.delay_s)

    def outside(self, process: SimProcess, main: RankTask | None) -> None:
        if main is not None and main.request is not None:  # it waits, and something is there to prolong
            main.debt_s += self.rule.delay_s
