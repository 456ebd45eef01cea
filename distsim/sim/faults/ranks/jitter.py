"""`jitter`: pauses of the operating system."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distsim.sim.faults.fault import Rule, check_ranks, of_ranks
from distsim.sim.faults.lasting import Lasting

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.isolation.process import SimProcess
    from distsim.sim.world import World

__all__ = ["Jitter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter(Rule):
    """The operating system takes the CPU away for *pause_s* in every *period_s*: at the same moments
    everywhere where *synchronous*, else each rank at its own."""

    ranks: tuple[int, ...] | None = None
    period_s: float
    pause_s: float
    synchronous: bool = True

    def __str__(self) -> str:
        who = "all ranks" if self.ranks is None else of_ranks(self.ranks)
        how = "at the same moments" if self.synchronous else "each at its own moments"
        return f"{who} pause {self.pause_s:g} s in every {self.period_s:g} s, {how}"

    def check(self, cluster: Cluster, world_size: int) -> None:
        check_ranks(self.ranks or (), world_size)

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
        pauses = math.floor((start_s + seconds + phase_s) / rule.period_s)
        pauses -= math.floor((start_s + phase_s) / rule.period_s)
        if not pauses or not self.active:
            return seconds
        self.hit()
        return seconds + pauses * rule.pause_s
