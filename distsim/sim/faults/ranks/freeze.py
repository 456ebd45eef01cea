"""`freeze`: ranks stopped (SIGSTOP), for good or for some time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distsim.debug.records import CallRecord, Phase
from distsim.sim.faults.ranks.rank_fault import RankFault, RankRule
from distsim.sim.kernel.scheduler import Request

if TYPE_CHECKING:
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.isolation.process import RankTask, SimProcess
    from distsim.sim.world import World

__all__ = ["Freeze"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(RankRule):
    """Ranks stopped (SIGSTOP), for good or for some time."""

    def __str__(self) -> str:
        return f"{self.who} stopped (SIGSTOP)"

    def planted(self, world: World, number: int, links: LinkState) -> _Freeze:
        return _Freeze(self, world, number)


class _Freeze(RankFault[Freeze]):
    def inside(self, task: RankTask, record: CallRecord) -> None:
        task.process.last_stack = record.stack
        self._stop(task.process)
        task._hand_over(Request(None, None))

    def outside(self, process: SimProcess, main: RankTask | None) -> None:
        self._stop(process)

    def _stop(self, process: SimProcess) -> None:
        process.thaw = self.world.env.event()
        process.phase, process.end_s = Phase.FROZEN, float(self.world.env.now)
        if self.rule.when.for_s is not None:
            self.later(self.rule.when.for_s, lambda: _go_on(process))


def _go_on(process: SimProcess) -> None:
    thaw, process.thaw = process.thaw, None
    if process.phase is Phase.FROZEN and thaw is not None:
        process.phase, process.end_s = Phase.RUNNING, None
        thaw.succeed()
