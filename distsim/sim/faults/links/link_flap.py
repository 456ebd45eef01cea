"""`link_flap`: a link that goes down and comes back, again and again."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distsim.sim.faults.links.network_fault import LinkRule, NetworkFault

if TYPE_CHECKING:
    import simpy

    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.world import World

__all__ = ["LinkFlap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFlap(LinkRule):
    period_s: float
    """One time up and down again."""
    down_s: float
    """The part of each period in which it is down."""

    def __str__(self) -> str:
        return f"{self.where} down for {self.down_s:g} s in every {self.period_s:g} s"

    def planted(self, world: World, number: int, links: LinkState) -> _Flap:
        return _Flap(self, world, number, links)


class _Flap(NetworkFault[LinkFlap]):
    def strike(self, links: list[int], for_s: float | None) -> None:
        self.world.env.process(self._flap(links, for_s))

    def _flap(self, links: list[int], for_s: float | None) -> Generator[simpy.Event, Any, None]:
        env = self.world.env
        end_s = float("inf") if for_s is None else float(env.now) + for_s
        while float(env.now) < end_s:
            cut = self.state.cut(links, str(self.rule), self.struck_s)
            yield env.timeout(self.rule.down_s)
            self.state.mend(cut)
            if env.peek() == float("inf") and not self.world.network.statistics().num_active_flows:
                return  # nobody is left to notice; a deadlock must not be kept alive
            yield env.timeout(self.rule.period_s - self.rule.down_s)
