"""Two searches of the same orders: ours, and one without any reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distsim.scenario.explore.tree import OrderTree
from distsim.sim.kernel.chooser import Orders
from distsim.sim.kernel.steps import NextOperation, Step, Trace, class_of


@dataclass
class Searched:
    """The classes of a program, in the order in which they were run, and the runs that came to none."""

    classes: list[int] = field(default_factory=list)
    blocked: int = 0


class EveryChoice:
    """A chooser that takes each possible operation at each step once."""

    def __init__(self) -> None:
        self.path: list[list[int]] = []

    def choose(self, steps: Sequence[Step], offers: Sequence[NextOperation]) -> NextOperation | None:
        """Take the next combination of choices."""
        if len(steps) == len(self.path):
            self.path.append([0, len(offers)])
        return offers[self.path[len(steps)][0]]

    def next_run(self) -> bool:
        """Return whether a combination is left."""
        while self.path and self.path[-1][0] + 1 >= self.path[-1][1]:
            self.path.pop()
        if self.path:
            self.path[-1][0] += 1
        return bool(self.path)


def with_reduction(run: Callable[[Orders], object], timeouts: bool = False) -> Searched:
    """Run once for each class."""
    tree, searched = OrderTree(), Searched()
    while (branch := tree.begin_run()) is not None:
        orders = Orders(branch, explores_timeouts=timeouts)
        run(orders)
        tree.end_run(orders.trace)
        if orders.trace.is_cut:
            searched.blocked += 1
        else:
            searched.classes.append(class_of(orders.trace))
    assert tree.is_exhausted
    return searched


def without_reduction(run: Callable[[Orders], object], most: int, timeouts: bool = False) -> set[int] | None:
    """Run every combination of choices; None if they are more than *most*."""
    every: EveryChoice = EveryChoice()
    classes: set[int] = set()
    for _ in range(most):
        orders = Orders(every, explores_timeouts=timeouts)
        run(orders)
        classes.add(class_of(orders.trace))
        if not every.next_run():
            return classes
    return None


def steps_of(trace: Trace) -> list[str]:
    """Return what was done, in order."""
    return [f"{step.offer.actor} {step.offer.label}" for step in trace.steps]
