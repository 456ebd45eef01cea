"""A NIC or a switch that is down: all its links are cut, and another may take over."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from distsim.errors import UsageError
from distsim.sim.faults.links.names import links_of_part
from distsim.sim.faults.links.network_fault import NetworkFault, NetworkRule
from distsim.sim.faults.links.state import Cut

if TYPE_CHECKING:
    from distsim.cluster import Cluster

__all__ = ["Outage", "PartDown", "PartFault"]


class Outage(NamedTuple):
    """The part that is down, the part that takes over (a second rail, another spine), and how long that takes."""

    part: str
    detour: str | None
    detour_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDown(NetworkRule):
    """All links of one vertex of the cluster are cut."""

    kind: ClassVar[str]
    """What it is in words."""
    kinds: ClassVar[tuple[str, ...]]
    """What it may be in a cluster."""

    @property
    @abstractmethod
    def outage(self) -> Outage:
        """The rule's own fields, which bear the names of its file, under common names."""

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
        """For each of *links* the like link of the part that takes over; empty where none does."""
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


R = TypeVar("R", bound=PartDown)


class PartFault(NetworkFault[R]):
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
        """Nobody has said who takes over."""

    def _end(self, cut: Cut, instead: dict[int, int]) -> None:
        self.state.end_cut(cut)
        if instead:
            self.state.network.reroute({link: link for link in cut.links})
