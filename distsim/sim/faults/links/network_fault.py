"""What all faults of links have in common: the links they are about, and the moment they strike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from distsim.sim.faults.fault import Fault, Rule
from distsim.sim.faults.links.names import links_of

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.c10d.arrival import Arrival
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.world import World

__all__ = ["LinkRule", "NetworkFault", "NetworkRule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRule(Rule):
    """A rule about some links of the cluster."""

    @abstractmethod
    def links_in(self, cluster: Cluster) -> list[int]:
        """Their indices; `UsageError` where there are none."""

    def has_detour(self) -> bool:
        """Whether it names another way for the traffic."""
        return False

    def check(self, cluster: Cluster, world_size: int) -> None:
        self.links_in(cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRule(NetworkRule):
    """A rule about every link that one of the patterns names."""

    link: str | tuple[str, ...]
    """'src->dst' as reports name links; * and ? match, a list is several."""

    @property
    def links(self) -> tuple[str, ...]:
        return (self.link,) if isinstance(self.link, str) else self.link

    def links_in(self, cluster: Cluster) -> list[int]:
        return links_of(cluster, self.links)

    @property
    def where(self) -> str:
        return f"link {', '.join(self.links)}"


R = TypeVar("R", bound=NetworkRule)


class NetworkFault(Fault[R]):
    """Strikes at its time, or with the first byte of its call."""

    def __init__(self, rule: R, world: World, number: int, state: LinkState) -> None:
        super().__init__(rule, world, number)
        self.state = state
        self._call = rule.when.call
        """What it waits for."""

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
        """Do it to *links* now, and see to it that it ends after *for_s*."""
