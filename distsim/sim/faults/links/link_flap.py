"""`link_flap`: a link that goes down and comes back, again and again."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt

from distsim.errors import UsageError
from distsim.sim.faults.links.network_fault import LinkRule, NetworkFault

if TYPE_CHECKING:
    import simpy

    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.world import World

__all__ = ["LinkFlap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFlap(LinkRule):
    """A link that goes down and comes back, again and again."""

    period_s: Annotated[float, Gt(0)]
    """From one time that it goes down to the next."""
    down_s: Annotated[float, Gt(0)]
    """How long it is down each time; shorter than period_s."""

    def __post_init__(self) -> None:
        if self.down_s >= self.period_s:
            raise UsageError(f"expected down_s below period_s, got {self.down_s:g} and {self.period_s:g}")

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
            self.state.end_cut(cut)
            if env.peek() == float("inf") and not self.world.network.statistics().num_active_flows:
                return  # nobody is left to notice; a deadlock must not be kept alive
            yield env.timeout(self.rule.period_s - self.rule.down_s)
