"""`link_slow`: a link with a fraction of its bandwidth, or a longer latency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le

from distsim.sim.faults.links.network_fault import LinkRule, NetworkFault

if TYPE_CHECKING:
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.world import World

__all__ = ["LinkSlow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSlow(LinkRule):
    """A link with a fraction of its bandwidth, or a longer latency."""

    factor: Annotated[float, Gt(0), Le(1)] = 1.0
    """Fraction of the bandwidth that is left."""
    extra_latency_s: Annotated[float, Ge(0)] = 0.0
    """What each message takes longer."""

    def __str__(self) -> str:
        slow = f"{self.where} at {self.factor:.3g} of its bandwidth"
        return slow + (f", {self.extra_latency_s:g} s later" if self.extra_latency_s else "")

    def planted(self, world: World, number: int, links: LinkState) -> _Slow:
        return _Slow(self, world, number, links)


class _Slow(NetworkFault[LinkSlow]):
    def strike(self, links: list[int], for_s: float | None) -> None:
        slowed = self.state.slow(dict.fromkeys(links, (self.rule.factor, self.rule.extra_latency_s)))
        if for_s is not None:
            self.later(for_s, lambda: self.state.end_slowdown(slowed))
