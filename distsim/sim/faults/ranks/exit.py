"""`exit`: ranks that leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from distsim.debug.records import CallRecord, Phase
from distsim.sim.faults.ranks.rank_fault import RankFault, RankRule, end_from_outside

if TYPE_CHECKING:
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.isolation.process import RankTask, SimProcess
    from distsim.sim.world import World

__all__ = ["Exit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit(RankRule):
    """Ranks that leave."""

    code: Annotated[int, Ge(0), Le(255)] = 1
    """Their exit code."""

    def __str__(self) -> str:
        return f"{self.who} left with exit code {self.code}"

    def planted(self, world: World, number: int, links: LinkState) -> _Exit:
        return _Exit(self, world, number)


class _Exit(RankFault[Exit]):
    def inside(self, task: RankTask, record: CallRecord) -> None:
        self.world.end_process(task.process, Phase.EXITED, self.rule.code)

    def outside(self, process: SimProcess, main: RankTask | None) -> None:
        end_from_outside(process, Phase.EXITED, self.rule.code)
