"""`link_lossy`: a link that loses packets, which are sent again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Gt, Lt

from distsim.sim.faults.links.network_fault import LinkRule, NetworkFault

if TYPE_CHECKING:
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.world import World

__all__ = ["LinkLossy"]

PACKET_BYTES = 4096
"""RoCE's largest path MTU (InfiniBand Architecture Specification, vol. 1, sec. 9.3.1)."""
ROUND_TRIP_S = 8e-6
"""Between two NICs through two switches; assumed, of the order that perftest shows on RoCE fabrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLossy(LinkRule):
    """A link that loses packets, which are sent again."""

    loss: Annotated[float, Gt(0), Lt(1)]
    """Fraction of packets lost."""
    recovery: Literal["go_back_n", "selective"] = "go_back_n"
    """What is sent again: the whole window (RoCE of old), or the lost packet alone."""

    def __str__(self) -> str:
        return f"{self.where} loses {self.loss:.3g} of its packets ({self.recovery})"

    def planted(self, world: World, number: int, links: LinkState) -> _Lossy:
        return _Lossy(self, world, number, links)


class _Lossy(NetworkFault[LinkLossy]):
    def strike(self, links: list[int], for_s: float | None) -> None:
        slowed = self.state.slow({link: self._slowness(link) for link in links})
        if for_s is not None:
            self.later(for_s, lambda: self.state.end_slowdown(slowed))

    def _slowness(self, link: int) -> tuple[float, float]:
        """Fraction of the bandwidth left, and the latency added."""
        p = self.rule.loss
        wasted = 1.0  # packets sent again for each one lost
        if self.rule.recovery == "go_back_n":
            bandwidth = self.state.cluster.links[link].bandwidth_bytes_per_s
            wasted = max(1.0, bandwidth * ROUND_TRIP_S / PACKET_BYTES)
        # Goodput with a window that covers the round trip: Bertsekas & Gallager, Data Networks (1992), sec. 2.4.2.
        return (1 - p) / (1 - p + p * wasted), p / (1 - p) * ROUND_TRIP_S
