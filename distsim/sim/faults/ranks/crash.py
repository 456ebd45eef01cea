"""`crash`: ranks killed by a signal."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distsim.debug.records import CallRecord, Phase
from distsim.errors import UsageError
from distsim.sim.faults.ranks.rank_fault import RankFault, RankRule, end_from_outside

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.isolation.process import RankTask, SimProcess
    from distsim.sim.world import World

__all__ = ["Crash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash(RankRule):
    """Ranks killed by a signal."""

    signal: str = "SIGKILL"
    """Such as SIGKILL, SIGSEGV, SIGTERM."""

    @property
    def exit_code(self) -> int:
        return -signal.Signals[self.signal].value

    def __str__(self) -> str:
        return f"{self.who} killed by {self.signal}"

    def check(self, cluster: Cluster, world_size: int) -> None:
        RankRule.check(self, cluster, world_size)
        if self.signal not in signal.Signals.__members__:
            raise UsageError(f"no signal {self.signal!r}; try SIGKILL, SIGSEGV or SIGABRT")

    def planted(self, world: World, number: int, links: LinkState) -> _Crash:
        return _Crash(self, world, number)


class _Crash(RankFault[Crash]):
    def inside(self, task: RankTask, record: CallRecord) -> None:
        self.world.end_process(task.process, Phase.KILLED, self.rule.exit_code, self.rule.signal)

    def outside(self, process: SimProcess, main: RankTask | None) -> None:
        end_from_outside(process, Phase.KILLED, self.rule.exit_code, self.rule.signal)
