"""`link_cut`: a link over which nothing moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from distsim.sim.faults.links.network_fault import LinkRule, NetworkFault

if TYPE_CHECKING:
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.world import World

__all__ = ["LinkCut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCut(LinkRule):
    """A link over which nothing moves. Between switches the fabric leads its traffic over others, where there are
    any; a NIC's own link has no other. With backend = 'gloo' the hosts that this leaves no way out are cut off for
    real (Linux network namespaces, which take root); so with nic_down and switch_down. at_s then counts from the
    moment all ranks have begun and their hosts' monitors know each other."""

    reroute_s: Annotated[float, Ge(0)] = 0.0
    """How long the fabric takes to find another way between its switches, where it has one."""

    def __str__(self) -> str:
        return f"{self.where} cut"

    def planted(self, world: World, number: int, links: LinkState) -> _CutLinks:
        return _CutLinks(self, world, number, links)


class _CutLinks(NetworkFault[LinkCut]):
    def strike(self, links: list[int], for_s: float | None) -> None:
        cut = self.state.cut(links, str(self.rule), self.struck_s)
        self.later(self.rule.reroute_s, lambda: self.state.notice(cut))
        if for_s is not None:
            self.later(for_s, lambda: self.state.end_cut(cut))
