"""`nic_down`: a NIC that is down; with a second rail its traffic goes there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from distsim.sim.faults.links.part_down import Outage, PartDown, PartFault

if TYPE_CHECKING:
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.world import World

__all__ = ["NicDown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NicDown(PartDown):
    """A NIC that is down; with a second rail its traffic goes there."""

    kind: ClassVar[str] = "NIC"
    kinds: ClassVar[tuple[str, ...]] = ("nic",)

    nic: str
    """Such as n0/nic0."""
    second_rail: str | None = None
    """The NIC that takes over, such as n0/nic1."""
    failover_s: Annotated[float, Ge(0)] = 0.0
    """How long that takes."""

    @property
    def outage(self) -> Outage:
        return Outage(self.nic, self.second_rail, self.failover_s)

    def planted(self, world: World, number: int, links: LinkState) -> PartFault[NicDown]:
        return PartFault(self, world, number, links)
