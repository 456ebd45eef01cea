"""`switch_down`: a switch that is down. Where the other switches have a way around it, the fabric takes that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from distsim.sim.faults.links.part_down import PartDown, PartFault

if TYPE_CHECKING:
    from distsim.sim.faults.links.state import Cut, LinkState
    from distsim.sim.world import World

__all__ = ["SwitchDown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchDown(PartDown):
    kind: ClassVar[str] = "switch"
    kinds: ClassVar[tuple[str, ...]] = ("leaf", "spine", "switch", "nvswitch")

    def planted(self, world: World, number: int, links: LinkState) -> _SwitchFault:
        return _SwitchFault(self, world, number, links)


class _SwitchFault(PartFault[SwitchDown]):
    def without_detour(self, cut: Cut) -> None:
        self.later(self.rule.detour_after_s, lambda: self.state.notice(cut))
