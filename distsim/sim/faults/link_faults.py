"""Faults of links, NICs and switches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from annotated_types import Ge, Gt, Le, Lt

from distsim.errors import UsageError
from distsim.sim.faults.fault import Fault, Rule
from distsim.sim.faults.links import Cut, links_of, links_of_part
from distsim.sim.kernel.scheduler import Event

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.c10d.work import Arrival
    from distsim.sim.faults.links import LinkState
    from distsim.sim.world import World

# -- What all faults of links have in common: the links they are about, and the moment they strike.


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRule(Rule):
    """A rule about some links of the cluster."""

    @abstractmethod
    def links_in(self, cluster: Cluster) -> list[int]:
        """Return the indices of the rule's links; raise `UsageError` if it matches none."""

    def has_detour(self) -> bool:
        """Return whether the rule names another route for the traffic."""
        return False

    def check(self, cluster: Cluster, world_size: int) -> None:
        self.links_in(cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRule(NetworkRule):
    """A rule about every link that matches one of the patterns."""

    link: str | tuple[str, ...]
    """Names of links as in reports, 'src->dst', or of a part, 'n3/nic0', for all its links; * and ? match, and a list
    gives several."""

    @property
    def links(self) -> tuple[str, ...]:
        return (self.link,) if isinstance(self.link, str) else self.link

    def links_in(self, cluster: Cluster) -> list[int]:
        return links_of(cluster, self.links)

    @property
    def where(self) -> str:
        return f"link {', '.join(self.links)}"


NetworkR = TypeVar("NetworkR", bound=NetworkRule)


class NetworkFault(Fault[NetworkR]):
    """A fault of links that strikes at its time, or with the first byte of its call."""

    def __init__(self, rule: NetworkR, world: World, number: int) -> None:
        super().__init__(rule, world, number)
        self._call = rule.when.call
        """Call for which the fault waits."""

    @property
    def state(self) -> LinkState:
        """Return the state of the links of the world."""
        links: LinkState = self.world.faults.links
        return links

    def begin(self) -> None:
        if self._call is None:
            self.later(self.rule.when.start_s, self._strike)

    def on_start(self, members: Sequence[Arrival]) -> None:
        if self._call is not None and any(self._call.matches(m.record) for m in members):
            self._call = None
            self.later(self.rule.when.after_s, self._strike)

    def _strike(self) -> None:
        self.hit()
        self.strike(self.rule.links_in(self.state.cluster), self.rule.when.for_s)

    @abstractmethod
    def strike(self, links: list[int], for_s: float | None) -> None:
        """Apply the fault to *links* now, and end it after *for_s*."""


# -- A NIC or a switch that is down: all its links are cut, and another may take over.


class Outage(NamedTuple):
    """The part that is down, the part that takes over (a second rail, another spine), and the seconds until it does."""

    part: str
    detour: str | None
    detour_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDown(NetworkRule):
    """A fault in which all links of one vertex of the cluster are down."""

    kind: ClassVar[str]
    """Name of the kind of vertex in messages."""
    kinds: ClassVar[tuple[str, ...]]
    """Kinds of vertices that the rule accepts."""

    @property
    @abstractmethod
    def outage(self) -> Outage:
        """Return the rule's fields, which have different names in each kind of rule, under common names."""

    def __str__(self) -> str:
        part, detour, after_s = self.outage
        if detour is None:
            return f"{part} down"
        later = f" after {after_s:g} s" if after_s else ""
        return f"{part} down, its traffic goes through {detour}{later}"

    def links_in(self, cluster: Cluster) -> list[int]:
        return links_of_part(cluster, self.outage.part, self.kind, self.kinds)

    def has_detour(self) -> bool:
        return self.outage.detour is not None

    def check(self, cluster: Cluster, world_size: int) -> None:
        self.detours(cluster, self.links_in(cluster))

    def detours(self, cluster: Cluster, links: list[int]) -> dict[int, int]:
        """Return for each of *links* the equivalent link that takes over; empty without a detour."""
        part, detour, _ = self.outage
        if detour is None:
            return {}
        candidates = [cluster.links[i] for i in links_of_part(cluster, detour, self.kind, self.kinds)]
        instead: dict[int, int] = {}
        for index in links:
            link = cluster.links[index]
            outwards = link.src == part
            alike = [t for t in candidates if (t.src == detour) == outwards and t.kind == link.kind]
            same_end = [t for t in alike if (t.dst if outwards else t.src) == (link.dst if outwards else link.src)]
            if not (same_end or alike):
                raise UsageError(f"{detour} has no link like {link.name} to take its traffic")
            instead[index] = (same_end or alike)[0].index
        return instead


PartR = TypeVar("PartR", bound=PartDown)


class PartFault(NetworkFault[PartR]):
    def strike(self, links: list[int], for_s: float | None) -> None:
        cut = self.state.cut(links, str(self.rule), self.struck_s)
        instead = self.rule.detours(self.state.cluster, links)
        if instead:
            self.later(self.rule.outage.detour_after_s, lambda: self.state.network.reroute(instead))
        else:
            self.without_detour(cut)
        if for_s is not None:
            self.later(for_s, lambda: self._end(cut, instead))

    def without_detour(self, cut: Cut) -> None:
        """Handle a cut for which the rule gives no detour. The default does nothing."""

    def _end(self, cut: Cut, instead: dict[int, int]) -> None:
        self.state.end_cut(cut)
        if instead:
            self.state.network.reroute({link: link for link in cut.links})


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCut(LinkRule):
    """A link that carries nothing. The fabric routes traffic between switches around it if there is another path; a
    NIC's own link has none. With backend = 'gloo', the hosts that this isolates are cut off for real (Linux
    network namespaces, which need root), and likewise with nic_down and switch_down. at_s then counts from the
    moment at which all ranks have started and their hosts' monitors have connected.
    """

    what: ClassVar[str] = "link_cut"
    reroute_s: Annotated[float, Ge(0)] = 0.0
    """Time until the fabric uses another path between its switches, if there is one."""

    def __str__(self) -> str:
        return f"{self.where} cut"


class _CutLinks(NetworkFault[LinkCut], rule=LinkCut):
    def strike(self, links: list[int], for_s: float | None) -> None:
        cut = self.state.cut(links, str(self.rule), self.struck_s)
        self.later(self.rule.reroute_s, lambda: self.state.notice(cut))
        if for_s is not None:
            self.later(for_s, lambda: self.state.end_cut(cut))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFlap(LinkRule):
    """A link that goes down and comes back up repeatedly."""

    what: ClassVar[str] = "link_flap"
    period_s: Annotated[float, Gt(0)]
    """Time from one failure to the next."""
    down_s: Annotated[float, Gt(0)]
    """Duration of each failure; shorter than period_s."""

    def __post_init__(self) -> None:
        if self.down_s >= self.period_s:
            raise UsageError(f"expected down_s below period_s, got {self.down_s:g} and {self.period_s:g}")

    def __str__(self) -> str:
        return f"{self.where} down for {self.down_s:g} s in every {self.period_s:g} s"


class _Flap(NetworkFault[LinkFlap], rule=LinkFlap):
    def strike(self, links: list[int], for_s: float | None) -> None:
        self.world.in_background(self._flap(links, for_s))

    def _flap(self, links: list[int], for_s: float | None) -> Generator[Event, Any, None]:
        world = self.world
        end_s = float("inf") if for_s is None else world.now_s + for_s
        while world.now_s < end_s:
            cut = self.state.cut(links, str(self.rule), self.struck_s)
            yield world.timer(self.rule.down_s)
            self.state.end_cut(cut)
            if world.next_event_s == float("inf") and not world.facts.network.statistics().num_active_flows:
                return  # nobody is left to notice; a deadlock must not be kept alive
            yield world.timer(self.rule.period_s - self.rule.down_s)


PACKET_BYTES = 4096
"""RoCE's largest path MTU (InfiniBand Architecture Specification, vol. 1, sec. 9.3.1)."""
ROUND_TRIP_S = 8e-6
"""Seconds of a round trip between two NICs through two switches.

Assumption, of the order that perftest shows on RoCE fabrics.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLossy(LinkRule):
    """A link that loses packets, which are retransmitted."""

    what: ClassVar[str] = "link_lossy"
    loss: Annotated[float, Gt(0), Lt(1)]
    """Fraction of packets lost."""
    recovery: Literal["go_back_n", "selective"] = "go_back_n"
    """Which packets are retransmitted: the whole window (go_back_n, older RoCE) or only the lost packet (selective)."""

    def __str__(self) -> str:
        return f"{self.where} loses {self.loss:.3g} of its packets ({self.recovery})"


class _Lossy(NetworkFault[LinkLossy], rule=LinkLossy):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSlow(LinkRule):
    """A link with a fraction of its bandwidth, or a longer latency."""

    what: ClassVar[str] = "link_slow"
    factor: Annotated[float, Gt(0), Le(1)] = 1.0
    """Fraction of the bandwidth that is left."""
    extra_latency_s: Annotated[float, Ge(0)] = 0.0
    """Additional latency of each message."""

    def __str__(self) -> str:
        slow = f"{self.where} at {self.factor:.3g} of its bandwidth"
        return slow + (f", {self.extra_latency_s:g} s later" if self.extra_latency_s else "")


class _Slow(NetworkFault[LinkSlow], rule=LinkSlow):
    def strike(self, links: list[int], for_s: float | None) -> None:
        slowed = self.state.slow(dict.fromkeys(links, (self.rule.factor, self.rule.extra_latency_s)))
        if for_s is not None:
            self.later(for_s, lambda: self.state.end_slowdown(slowed))


@dataclass(frozen=True, slots=True, kw_only=True)
class NicDown(PartDown):
    """A NIC that is down. If there is a second rail, its traffic uses that."""

    what: ClassVar[str] = "nic_down"
    kind: ClassVar[str] = "NIC"
    kinds: ClassVar[tuple[str, ...]] = ("nic",)

    nic: str
    """Name of the NIC, such as n0/nic0."""
    second_rail: str | None = None
    """The NIC that takes over, such as n0/nic1."""
    failover_s: Annotated[float, Ge(0)] = 0.0
    """Time until the other NIC takes over."""

    @property
    def outage(self) -> Outage:
        return Outage(self.nic, self.second_rail, self.failover_s)


class _NicFault(PartFault[NicDown], rule=NicDown):
    """A NIC that is down in one world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchDown(PartDown):
    """A switch that is down. The fabric routes around it if there is another path."""

    what: ClassVar[str] = "switch_down"
    kind: ClassVar[str] = "switch"
    kinds: ClassVar[tuple[str, ...]] = ("leaf", "spine", "switch", "nvswitch")

    switch: str
    """Name of the switch, such as leaf0 or spine1."""
    around: str | None = None
    """Switch that takes over its links, including those of NICs (default: other paths of the graph)."""
    reroute_s: Annotated[float, Ge(0)] = 0.0
    """Time until the fabric uses the other path."""

    @property
    def outage(self) -> Outage:
        return Outage(self.switch, self.around, self.reroute_s)


class _SwitchFault(PartFault[SwitchDown], rule=SwitchDown):
    def without_detour(self, cut: Cut) -> None:
        self.later(self.rule.reroute_s, lambda: self.state.notice(cut))
