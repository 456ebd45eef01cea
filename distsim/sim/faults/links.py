"""Links and switches of a simulated cluster that go wrong, and come back."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TYPE_CHECKING, Any

import simpy

from distsim.cluster import Cluster
from distsim.errors import UsageError
from distsim.sim.faults.rules import LinkFault, PartDown

if TYPE_CHECKING:
    from distsim.network import Network

__all__ = ["NetworkFaults", "links_of", "links_of_part"]

PACKET_BYTES = 4096
"""RoCE's largest path MTU (InfiniBand Architecture Specification, vol. 1, sec. 9.3.1)."""
ROUND_TRIP_S = 8e-6
"""Between two NICs through two switches; assumed, of the order that perftest shows on RoCE fabrics."""


def links_of(cluster: Cluster, patterns: Sequence[str]) -> list[int]:
    """Indices of the links whose names (`src->dst`) the shell patterns name; each must name one."""
    found: dict[int, None] = {}
    for pattern in patterns:
        hits = [link.index for link in cluster.links if fnmatch.fnmatchcase(link.name, pattern)]
        if not hits:
            raise UsageError(
                f"no link {pattern!r} in {cluster.name}; {_close(pattern, [n.name for n in cluster.links])}"
            )
        found.update(dict.fromkeys(hits))
    return list(found)


def links_of_part(cluster: Cluster, part: str, what: str) -> list[int]:
    """Indices of all links from and to the vertex *part*."""
    wanted = ("nic",) if what == "nic_down" else ("leaf", "spine", "switch", "nvswitch")
    vertex = next((v for v in cluster.vertices if v.name == part), None)
    if vertex is None or vertex.kind not in wanted:
        names = [v.name for v in cluster.vertices if v.kind in wanted]
        kind = "NIC" if what == "nic_down" else "switch"
        raise UsageError(f"no {kind} {part!r} in {cluster.name}; {_close(part, names)}")
    return [link.index for link in cluster.links if part in (link.src, link.dst)]


def _close(name: str, known: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or list(known[:3])
    return f"there is {', '.join(near)}, ... (distsim topo show has all)" if near else "there is none"


class NetworkFaults:
    """Makes the rules about links strike on one network. Several on one link add up: the worst counts."""

    def __init__(self, env: simpy.Environment, network: Network) -> None:
        self.env = env
        self.network = network
        self.cluster = network.cluster
        self.down: dict[int, list[LinkFault | PartDown]] = {}
        """Links that carry nothing now, and the rules that cut them."""
        self._noticed: dict[int, Sequence[int]] = {}
        """Links that the fabric leads its traffic around, by rule."""
        self._slow: dict[int, dict[int, tuple[float, float]]] = {}

    def begin(self, rule: LinkFault | PartDown) -> None:
        """The rule strikes now."""
        for_s = rule.when.for_s
        if isinstance(rule, PartDown):
            links = links_of_part(self.cluster, rule.part, rule.what)
            self._cut(links, rule)
            if rule.what == "switch_down" and rule.detour is None:
                self._after(rule.detour_after_s, lambda: self._notice(links, rule))
            if rule.detour is not None:
                instead = _detours(self.cluster, rule)
                self._after(rule.detour_after_s, lambda: self.network.reroute(instead))
            if for_s is not None:
                self._after(for_s, lambda: self._mend(links, rule))
            return
        links = links_of(self.cluster, rule.links)
        if rule.what == "link_cut":
            self._cut(links, rule)
            self._after(rule.reroute_s, lambda: self._notice(links, rule))
            if for_s is not None:
                self._after(for_s, lambda: self._mend(links, rule))
        elif rule.what == "link_flap":
            self.env.process(self._flap(links, rule))
        else:
            for link in links:
                self._slow.setdefault(link, {})[id(rule)] = _slowness(self.cluster, link, rule)
                self._apply(link)
            if for_s is not None:
                self._after(for_s, lambda: self._quicken(links, rule))

    def _cut(self, links: Sequence[int], rule: LinkFault | PartDown) -> None:
        for link in links:
            self.down.setdefault(link, []).append(rule)
            self._apply(link)

    def _mend(self, links: Sequence[int], rule: LinkFault | PartDown) -> None:
        for link in links:
            self.down[link].remove(rule)
            if not self.down[link]:
                del self.down[link]
            self._apply(link)
        if isinstance(rule, PartDown) and rule.detour is not None:
            self.network.reroute({link: link for link in links})
        if id(rule) in self._noticed:
            del self._noticed[id(rule)]
            self._lead()

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

    def _notice(self, links: Sequence[int], rule: LinkFault | PartDown) -> None:
        """The fabric has found out, and leads its traffic around, where it has a way."""
        if all(rule in self.down.get(link, ()) for link in links):
            self._noticed[id(rule)] = links
            self._lead()

    def _lead(self) -> None:
        self.network.lead_around({link for links in self._noticed.values() for link in links})

    def _quicken(self, links: Sequence[int], rule: LinkFault) -> None:
        for link in links:
            del self._slow[link][id(rule)]
            self._apply(link)

    def _apply(self, link: int) -> None:
        slow = list(self._slow.get(link, {}).values())
        factor = min((f for f, _ in slow), default=1.0)
        extra_s = max((s for _, s in slow), default=0.0)
        self.network.set_link(link, factor, extra_s, up=link not in self.down)

    def _flap(self, links: Sequence[int], rule: LinkFault) -> Generator[simpy.Event, Any, None]:
        end_s = float("inf") if rule.when.for_s is None else float(self.env.now) + rule.when.for_s
        while float(self.env.now) < end_s:
            self._cut(links, rule)
            yield self.env.timeout(rule.down_s)
            self._mend(links, rule)
            if self.env.peek() == float("inf") and not self.network.statistics().num_active_flows:
                return  # nobody is left to notice; a deadlock must not be kept alive
            yield self.env.timeout(rule.period_s - rule.down_s)

    def _after(self, delay_s: float, call: Callable[[], None]) -> None:
        if delay_s <= 0.0:
            call()
            return
        timer = self.env.timeout(delay_s)
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: call())


def _slowness(cluster: Cluster, link: int, rule: LinkFault) -> tuple[float, float]:
    """Fraction of the bandwidth left, and the latency added."""
    if rule.what == "link_slow":
        return rule.factor, rule.extra_latency_s
    p = rule.loss
    wasted = 1.0  # packets sent again for each one lost
    if rule.recovery == "go_back_n":
        wasted = max(1.0, cluster.links[link].bandwidth_bytes_per_s * ROUND_TRIP_S / PACKET_BYTES)
    # Goodput with a window that covers the round trip: Bertsekas & Gallager, Data Networks (1992), sec. 2.4.2.
    return (1 - p) / (1 - p + p * wasted), p / (1 - p) * ROUND_TRIP_S


def _detours(cluster: Cluster, rule: PartDown) -> dict[int, int]:
    """For each link of the part that is down, the like link of the part that takes over."""
    assert rule.detour is not None
    theirs = [cluster.links[i] for i in links_of_part(cluster, rule.detour, rule.what)]
    instead: dict[int, int] = {}
    for index in links_of_part(cluster, rule.part, rule.what):
        link = cluster.links[index]
        outwards = link.src == rule.part
        alike = [t for t in theirs if (t.src == rule.detour) == outwards and t.kind == link.kind]
        same_end = [t for t in alike if (t.dst if outwards else t.src) == (link.dst if outwards else link.src)]
        if not (same_end or alike):
            raise UsageError(f"{rule.detour} has no link like {link.name} to take its traffic")
        instead[index] = (same_end or alike)[0].index
    return instead
