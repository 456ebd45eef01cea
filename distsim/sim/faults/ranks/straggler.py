"""`straggler`: ranks that are slow all the time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge

from distsim.debug.records import CallRecord
from distsim.sim.faults.lasting import Lasting
from distsim.sim.faults.ranks.rank_fault import RankRule

if TYPE_CHECKING:
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.isolation.process import RankTask, SimProcess
    from distsim.sim.world import World

__all__ = ["Straggler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler(RankRule):
    """Ranks that are slow all the time."""

    factor: Annotated[float, Ge(1)] = 1.0
    """Their operators, on CPU or GPU, take so many times as long."""
    delay_s: Annotated[float, Ge(0)] = 0.0
    """Mean time lost before each call."""
    distribution: Literal["constant", "exponential", "uniform", "pareto"] = "constant"
    """Of that time: uniform from 0 to twice the mean, pareto with a long tail."""

    def __str__(self) -> str:
        parts = []
        if self.factor != 1.0:
            parts.append(f"computes {self.factor:g} times as long")
        if self.delay_s:
            parts.append(f"loses {self.delay_s:g} s ({self.distribution}) before each call")
        return f"{self.who} {' and '.join(parts) or 'is as fast as ever'}"

    def planted(self, world: World, number: int, links: LinkState) -> _Straggler:
        return _Straggler(self, world, number)


class _Straggler(Lasting[Straggler]):
    def __init__(self, rule: Straggler, world: World, number: int) -> None:
        super().__init__(rule, world, number)
        self._draws: dict[int, random.Random] = {}
        """By rank."""

    def on_call(self, task: RankTask, record: CallRecord) -> None:
        super().on_call(task, record)
        rule = self.rule
        if record.rank in rule.ranks and rule.delay_s > 0.0 and self.active(task.now_s()):
            self.hit()
            task.compute(self._lost_s(record.rank))
            task.flush()
            record.issued_s = task.now_s()

    def _lost_s(self, rank: int) -> float:
        draw = self._draws.get(rank)
        if draw is None:
            draw = self._draws[rank] = random.Random(f"{self.world.seed}:{self.number}:{rank}")
        mean_s = self.rule.delay_s
        match self.rule.distribution:
            case "exponential":
                return draw.expovariate(1.0 / mean_s)
            case "uniform":
                return draw.uniform(0.0, 2.0 * mean_s)
            case "pareto":  # shape 2: the mean is twice the scale, and is moved to begin at zero
                return (draw.paretovariate(2.0) - 1.0) * mean_s
            case _:
                return mean_s

    def compute_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        if process.rank not in self.rule.ranks or self.rule.factor == 1.0 or not self.active(start_s):
            return seconds
        self.hit()
        return seconds * self.rule.factor

    kernel_s = compute_s
