"""`exception`: ranks in which an exception is raised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distsim.debug.records import CallRecord, State
from distsim.errors import UsageError
from distsim.sim.faults.ranks.rank_fault import RankFault, RankRule
from distsim.text.exceptions import exception_named

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.isolation.process import RankTask, SimProcess
    from distsim.sim.world import World

__all__ = ["Raise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise(RankRule):
    """Ranks in which an exception is raised."""

    exception: str = "RuntimeError"
    """A name of Python's or torch.distributed's, or with its module: 'torch.cuda.OutOfMemoryError'."""
    message: str = "injected fault"
    """What it says."""

    def __str__(self) -> str:
        return f"{self.exception} raised on {self.who}"

    def made(self) -> Exception:
        """The exception itself; `UsageError` where there is none of that name."""
        kind = exception_named(self.exception)
        try:
            return kind(self.message)
        except TypeError:  # UnicodeDecodeError and its like want more than a text
            raise UsageError(f"{self.exception} cannot be made of a message alone; try RuntimeError") from None

    def check(self, cluster: Cluster, world_size: int) -> None:
        RankRule.check(self, cluster, world_size)
        self.made()

    def planted(self, world: World, number: int, links: LinkState) -> _Raise:
        return _Raise(self, world, number)


class _Raise(RankFault[Raise]):
    def inside(self, task: RankTask, record: CallRecord) -> None:
        record.state, record.error = State.FAILED, self.rule.message
        raise self.rule.made()

    def outside(self, process: SimProcess, main: RankTask | None) -> None:
        if main is not None and main.request is not None:  # only where it can be delivered
            main.interrupt(self.rule.made())
