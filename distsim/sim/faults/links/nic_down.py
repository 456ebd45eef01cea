"""`nic_down`: a NIC that is down; with a second rail its traffic goes there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from distsim.sim.faults.links.part_down import PartDown, PartFault

if TYPE_CHECKING:
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.world import World

__all__ = ["NicDown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NicDown(PartDown):
    kind: ClassVar[str] = "NIC"
    kinds: ClassVar[tuple[str, ...]] = ("nic",)

    def planted(self, world: World, number: int, links: LinkState) -> PartFault[NicDown]:
        return PartFault(self, world, number, links)
