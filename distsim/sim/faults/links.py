"""Links of one world: name patterns, the effect of faults on links, and the calls that wait for a cut link."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distsim.cluster import Cluster
from distsim.debug.records import CallRecord, Finding, State
from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError

if TYPE_CHECKING:
    from distsim.network import Network
    from distsim.sim.world import World

# -- The links that a rule names: by pattern, or by the part that they belong to.

CUTS = ("link_cut", "nic_down", "switch_down")
"""Faults that can cut hosts off, and that can be imitated on a real network."""


def links_of(cluster: Cluster, patterns: Sequence[str]) -> list[int]:
    """Return the indices of links whose names (`src->dst`) match the shell patterns; each pattern must match one.

    A pattern of a part (`n3/nic0`) means all links from and to it.
    """
    link_ids: dict[int, None] = {}
    for pattern in patterns:
        names = [pattern] if "->" in pattern else [pattern, f"{pattern}->*", f"*->{pattern}"]
        hits = [link.index for link in cluster.links if any(fnmatch.fnmatchcase(link.name, name) for name in names)]
        if not hits:
            raise UsageError(
                f"no link {pattern!r} in {cluster.name}; {_close(pattern, [n.name for n in cluster.links])}"
            )
        link_ids.update(dict.fromkeys(hits))
    return list(link_ids)


def links_of_part(cluster: Cluster, part: str, kind: str, kinds: Sequence[str]) -> list[int]:
    """Return the indices of all links from and to vertex *part*, which must be of one of *kinds* (called *kind* in
    messages).
    """
    vertex = next((v for v in cluster.vertices if v.name == part), None)
    if vertex is None or vertex.kind not in kinds:
        names = [v.name for v in cluster.vertices if v.kind in kinds]
        raise UsageError(f"no {kind} {part!r} in {cluster.name}; {_close(part, names)}")
    return [link.index for link in cluster.links if part in (link.src, link.dst)]


def _close(name: str, known: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or list(known[:3])
    return f"expected one of {', '.join(near)}, ... (distsim topo show lists all)" if near else "there is none"


# -- The links of one world: which are cut or slowed, by what, and what the fabric leads its traffic around.


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Links that a fault has cut, the reason as text, and the time at which it first struck."""

    links: Sequence[int]
    why: str
    struck_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Slowed:
    """Links that a fault has slowed, with the remaining fraction of the bandwidth and the added latency of each."""

    links: Mapping[int, tuple[float, float]]


class LinkState:
    """Combined effect of all faults on links. If several faults affect one link, the worst counts."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.cluster = network.cluster
        self.down: dict[int, list[Cut]] = {}
        """Links that are down, and the cuts that cause it."""
        self._noticed: dict[Cut, None] = {}
        """Cuts around which the fabric already routes its traffic."""
        self._slow: dict[int, list[Slowed]] = {}

    def cut(self, links: Sequence[int], why: str, struck_s: float | None) -> Cut:
        """Stop traffic over *links*."""
        result = Cut(links, why, struck_s)
        for link in links:
            self.down.setdefault(link, []).append(result)
            self._apply(link)
        return result

    def end_cut(self, cut: Cut) -> None:
        """Restore traffic over the links of *cut* unless another fault cuts them."""
        for link in cut.links:
            self.down[link].remove(cut)
            if not self.down[link]:
                del self.down[link]
            self._apply(link)
        if cut in self._noticed:
            del self._noticed[cut]
            self._lead()

    def notice(self, cut: Cut) -> None:
        """Let the fabric route around a cut, if it has another path."""
        if all(cut in self.down.get(link, ()) for link in cut.links):
            self._noticed[cut] = None
            self._lead()

    def _lead(self) -> None:
        self.network.lead_around({link for cut in self._noticed for link in cut.links})

    def slow(self, links: Mapping[int, tuple[float, float]]) -> Slowed:
        """Reduce each of *links* to this fraction of its bandwidth and add this latency."""
        result = Slowed(links)
        for link in links:
            self._slow.setdefault(link, []).append(result)
            self._apply(link)
        return result

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
        """Return the hosts on *switches* that have no path left to or from other switches."""
        host_of = {v.name: v.host for v in self.cluster.vertices}
        ways: dict[tuple[str, bool], list[int]] = {}
        hosts: dict[str, set[int | None]] = {}
        for link in self.cluster.links:
            if host_of[link.src] is not None:
                hosts.setdefault(link.dst, set()).add(host_of[link.src])
            elif host_of[link.dst] is None:
                ways.setdefault((link.src, True), []).append(link.index)
                ways.setdefault((link.dst, False), []).append(link.index)
        result: set[int | None] = set()
        for (switch, _), links in ways.items():
            if switch in switches and all(link in self.down for link in links):
                result |= hosts.get(switch, set())
        return result


# -- What nothing moves over any more, and whose traffic that is: the finding of somebody who looks at the links.


def stalled_links(world: World, state: LinkState) -> list[Finding]:
    """Return one finding about all cut links that a transfer waits to cross; empty if there are none."""
    if not state.down:
        return []
    stalled = [link for link in world.facts.network.stalled() if link in state.down]
    if not stalled:
        return []
    names = [world.facts.cluster.links[link].name for link in stalled[:3]]
    more = f" and {len(stalled) - 3} more" if len(stalled) > 3 else ""
    cut, calls = state.down[stalled[0]][0], _moving(world)
    return [
        Finding(
            Kind.NETWORK_FAULT,
            _behind(world, state, stalled, calls),
            f"nothing moves over link{'s' if len(stalled) > 1 else ''} {', '.join(names)}{more} ({cut.why})",
            group=calls[0].group if calls else None,
            call=calls[0] if calls else None,
            site=calls[0].site if calls else None,
            at_s=cut.struck_s,
            suggestion=f"Look at {names[0]}: cable, port counters, the switch's log. A second rail (detour) would "
            f"have carried the traffic.",
        )
    ]


def _moving(world: World) -> list[CallRecord]:
    """Return calls that have all their members and have not ended, the oldest first."""
    calls = [
        r for process in world.rank_processes.values() for r in process.records if r.state is State.STARTED and r.dtypes
    ]
    return sorted(calls, key=lambda r: (r.started_s or 0.0, r.rank))


def _behind(world: World, state: LinkState, links: Sequence[int], calls: Sequence[CallRecord]) -> tuple[int, ...]:
    """Return the ranks whose traffic crosses *links*.

    They are the ranks on the hosts at the ends of the links, or behind a switch that the links isolate, else all
    ranks of the calls.
    """
    vertices = {v.name: v for v in world.facts.cluster.vertices}
    ends = [vertices[name] for i in links for link in [world.facts.cluster.links[i]] for name in (link.src, link.dst)]
    hosts = {v.host for v in ends if v.host is not None} or state.cut_off({v.name for v in ends})
    members = calls[0].members if calls else tuple(range(world.world_size))
    on_hosts = tuple(r for r in members if world.facts.slots[r].host in hosts)
    inside = all(v.kind not in ("nic", "leaf", "spine", "switch") for v in ends)
    near = [r for r in on_hosts if inside and any(v.name == world.facts.slots[r].device for v in ends)]
    return tuple(near) or on_hosts or tuple(members)
