"""The links of one world: which are cut or slowed, by what, and what the fabric leads its traffic around."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distsim.network import Network

__all__ = ["Cut", "LinkState", "Slowed"]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Links that a fault has cut, *why* in its own words, and when it first struck."""

    links: Sequence[int]
    why: str
    struck_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Slowed:
    """Links that a fault has slowed: for each the fraction of its bandwidth left, and the latency added."""

    links: Mapping[int, tuple[float, float]]


class LinkState:
    """What all faults together make of the links. Several on one link add up: the worst counts."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.cluster = network.cluster
        self.down: dict[int, list[Cut]] = {}
        """Links that carry nothing now, and what cut them."""
        self._noticed: dict[Cut, None] = {}
        """What the fabric leads its traffic around."""
        self._slow: dict[int, list[Slowed]] = {}

    def cut(self, links: Sequence[int], why: str, struck_s: float | None) -> Cut:
        """Nothing moves over *links* from now on."""
        made = Cut(links, why, struck_s)
        for link in links:
            self.down.setdefault(link, []).append(made)
            self._apply(link)
        return made

    def end_cut(self, cut: Cut) -> None:
        """Let traffic cross the links of *cut* again, where no other fault has cut them."""
        for link in cut.links:
            self.down[link].remove(cut)
            if not self.down[link]:
                del self.down[link]
            self._apply(link)
        if cut in self._noticed:
            del self._noticed[cut]
            self._lead()

    def notice(self, cut: Cut) -> None:
        """The fabric has found out, and leads its traffic around, where it has a way."""
        if all(cut in self.down.get(link, ()) for link in cut.links):
            self._noticed[cut] = None
            self._lead()

    def _lead(self) -> None:
        self.network.lead_around({link for cut in self._noticed for link in cut.links})

    def slow(self, links: Mapping[int, tuple[float, float]]) -> Slowed:
        """Each of *links* has this fraction of its bandwidth left, and that much more latency."""
        made = Slowed(links)
        for link in links:
            self._slow.setdefault(link, []).append(made)
            self._apply(link)
        return made

    def end_slowdown(self, slowed: Slowed) -> None:
        """Restore the bandwidth and the latency that `slow` took."""
        for link in slowed.links:
            self._slow[link].remove(slowed)
            self._apply(link)

    def _apply(self, link: int) -> None:
        slow = [slowed.links[link] for slowed in self._slow.get(link, ())]
        factor = min((f for f, _ in slow), default=1.0)
        extra_s = max((s for _, s in slow), default=0.0)
        self.network.set_link(link, factor, extra_s, up=link not in self.down)

    def cut_off(self, switches: Collection[str]) -> set[int | None]:
        """The hosts on those of *switches* that have no way left to, or from, other switches."""
        host_of = {v.name: v.host for v in self.cluster.vertices}
        ways: dict[tuple[str, bool], list[int]] = {}
        hosts: dict[str, set[int | None]] = {}
        for link in self.cluster.links:
            if host_of[link.src] is not None:
                hosts.setdefault(link.dst, set()).add(host_of[link.src])
            elif host_of[link.dst] is None:
                ways.setdefault((link.src, True), []).append(link.index)
                ways.setdefault((link.dst, False), []).append(link.index)
        found: set[int | None] = set()
        for (switch, _), links in ways.items():
            if switch in switches and all(link in self.down for link in links):
                found |= hosts.get(switch, set())
        return found
