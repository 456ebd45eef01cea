"""`master_unreachable`: the host of rank 0 cannot be reached from the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distsim.sim.faults.fault import Rule
from distsim.sim.faults.store_unreachable import Unreached

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.isolation.process import SimProcess
    from distsim.sim.world import World

__all__ = ["MasterUnreachable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterUnreachable(Rule):
    """The host of rank 0 cannot be reached from the others."""

    def __str__(self) -> str:
        return "the master cannot be reached from other hosts"

    def check(self, cluster: Cluster, world_size: int) -> None:
        """It names nothing."""

    def planted(self, world: World, number: int, links: LinkState) -> _MasterUnreachable:
        return _MasterUnreachable(self, world, number)


class _MasterUnreachable(Unreached[MasterUnreachable]):
    def means(self, process: SimProcess) -> bool:
        return process.slot.host != self.world.slots[0].host
