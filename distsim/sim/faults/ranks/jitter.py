"""`jitter`: pauses of the operating system."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Len

from distsim.errors import UsageError
from distsim.sim.faults.fault import Rank, Rule, check_ranks
from distsim.sim.faults.lasting import Lasting
from distsim.text.ranks import of_ranks
from distsim.text.units import format_time

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.isolation.process import SimProcess
    from distsim.sim.world import World

__all__ = ["Jitter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter(Rule):
    """Pauses of the operating system, in what the host computes and while it launches kernels."""

    ranks: Annotated[tuple[Rank, ...], Len(1)] | None = None
    """Default: all."""
    period_s: Annotated[float, Gt(0)]
    """There is a pause in every such time."""
    pause_s: Annotated[float, Gt(0)]
    """How long each takes."""
    synchronous: bool = True
    """All ranks pause at the same moments."""

    def __str__(self) -> str:
        who = "all ranks" if self.ranks is None else of_ranks(self.ranks)
        how = "at the same moments" if self.synchronous else "each at its own moments"
        return f"{who} pause {self.pause_s:g} s in every {self.period_s:g} s, {how}"

    def check(self, cluster: Cluster, world_size: int) -> None:
        check_ranks(self.ranks or (), world_size)
        if self.pause_s >= self.period_s:
            told = f"{format_time(self.pause_s)} and {format_time(self.period_s)}"
            raise UsageError(f"expected pause_s below period_s, got {told}: no time would be left to compute")

    def planted(self, world: World, number: int, links: LinkState) -> _Jitter:
        return _Jitter(self, world, number)


class _Jitter(Lasting[Jitter]):
    def compute_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        rule = self.rule
        if rule.ranks is not None and process.rank not in rule.ranks:
            return seconds
        phase_s = 0.0
        if not rule.synchronous:
            phase_s = random.Random(f"{self.world.seed}:{self.number}:{process.rank}").uniform(0.0, rule.period_s)
        begin_s = max(start_s, self._from_s)
        rest_s = seconds - (begin_s - start_s)
        if rest_s <= 0.0 or begin_s >= self.until_s:
            return seconds
        here_s, worked_s = begin_s + phase_s, self._worked_s(begin_s + phase_s)
        end_s, over_s = self._when_s(worked_s + rest_s), self.until_s + phase_s
        if end_s > over_s:  # it ends in the middle of the operator
            end_s = over_s + max(0.0, rest_s - (self._worked_s(over_s) - worked_s))
        lost_s = end_s - here_s - rest_s
        if lost_s < 1e-9 * rule.pause_s:
            return seconds
        self.hit()
        return seconds + lost_s

    host_s = compute_s

    def _worked_s(self, until_s: float) -> float:
        """How much of the time from 0 to *until_s* is left to compute; the pause ends each period."""
        rule = self.rule
        full, part_s = divmod(until_s, rule.period_s)
        share_s = rule.period_s - rule.pause_s
        return full * share_s + min(part_s, share_s)

    def _when_s(self, worked_s: float) -> float:
        """When so much has been computed."""
        rule = self.rule
        share_s = rule.period_s - rule.pause_s
        full = max(0, math.ceil(worked_s / share_s - 1e-12) - 1)
        return full * rule.period_s + (worked_s - full * share_s)
