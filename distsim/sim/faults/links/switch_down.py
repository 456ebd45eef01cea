"""`switch_down`: a switch that is down. Where the other switches have a way around it, the fabric takes that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from distsim.sim.faults.links.part_down import Outage, PartDown, PartFault

if TYPE_CHECKING:
    from distsim.sim.faults.links.state import Cut, LinkState
    from distsim.sim.world import World

__all__ = ["SwitchDown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchDown(PartDown):
    """A switch that is down. Where the other switches have a way around it, the fabric takes that."""

    kind: ClassVar[str] = "switch"
    kinds: ClassVar[tuple[str, ...]] = ("leaf", "spine", "switch", "nvswitch")

    switch: str
    """Such as leaf0, spine1."""
    around: str | None = None
    """The switch that takes over its links, also those of NICs (default: what the graph has)."""
    reroute_s: Annotated[float, Ge(0)] = 0.0
    """How long the fabric takes to find it."""

    @property
    def outage(self) -> Outage:
        return Outage(self.switch, self.around, self.reroute_s)

    def planted(self, world: World, number: int, links: LinkState) -> _SwitchFault:
        return _SwitchFault(self, world, number, links)


class _SwitchFault(PartFault[SwitchDown]):
    def without_detour(self, cut: Cut) -> None:
        self.later(self.rule.reroute_s, lambda: self.state.notice(cut))
