"""Depth-first search over runs: one for each class of orders (source-DPOR).

Source: Abdulla, Aronis, Jonsson, Sagonas, "Optimal dynamic partial order reduction", POPL 2014, algorithm 1.

Two additions: which message a receive from any source takes is no order of sends, so its alternatives are determined at
the end of a run. And the operations that tasks were about to do when a run ended count in races, because a run that
stops at a mismatch or a deadlock would hide orders.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from distsim.sim.kernel.clocks import Clock, includes
from distsim.sim.kernel.steps import NextOperation, Step, Trace, dependent


class NotRepeatable(Exception):
    """The program does something else after the same choices. *step* is the first different one."""

    def __init__(self, step: int, before: Sequence[NextOperation], now: Sequence[NextOperation]) -> None:
        self.step, self.before, self.now = step, before, now
        super().__init__(f"step {step}")


@dataclass(slots=True)
class _Node:
    """A moment of the current run at which something was chosen."""

    possible: dict[str, NextOperation]
    """The operations that were possible, in the usual order."""
    chosen: str
    sleep: dict[str, NextOperation]
    """Operations that need no run from here: all their orders were explored before."""
    todo: list[str]
    """Operations that must be chosen here once, with those that were."""
    done: set[str] = field(default_factory=set)

    def remaining(self) -> list[str]:
        """Return what is still to be chosen here."""
        return [one for one in self.todo if one not in self.done and one not in self.sleep and one != self.chosen]

    def asleep_below(self) -> dict[str, NextOperation]:
        """Return the operations that need no run after the chosen one."""
        chosen = self.possible[self.chosen]
        explored = self.sleep | {one: self.possible[one] for one in self.done if one != self.chosen}
        return {one: offer for one, offer in explored.items() if not dependent(offer, chosen)}


class OrderTree:
    """The orders of one program, explored run by run. It is the chooser of each of its runs."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._shuffle: random.Random | None = None
        self._prefix = 0
        """Number of steps that the next run repeats."""
        self.mismatch: NotRepeatable | None = None
        """Set when a run did not repeat its prefix."""
        self.is_exhausted = False

    # -- during a run

    def choose(self, steps: Sequence[Step], offers: Sequence[NextOperation]) -> NextOperation | None:
        """Return the operation of the prefix, below it the first in the usual order that is not asleep."""
        depth = len(steps)
        if depth < len(self._nodes):
            node = self._nodes[depth]
            if {offer.id: offer for offer in offers} != node.possible:
                self.mismatch = NotRepeatable(depth, list(node.possible.values()), offers)
                return None
            return next(offer for offer in offers if offer.id == node.chosen)
        sleep = self._nodes[-1].asleep_below() if self._nodes else {}
        awake = [offer for offer in offers if offer.id not in sleep]
        if not awake:
            return None
        chosen = awake[0]
        self._nodes.append(_Node({offer.id: offer for offer in offers}, chosen.id, sleep, [chosen.id]))
        return chosen

    # -- between runs

    def shuffle(self, source: random.Random) -> None:
        """Take branches in random order from now on, because not all of them can be taken."""
        self._shuffle = source

    def end_run(self, trace: Trace) -> None:
        """Find out what must be tried because of a run that has ended.

        Raises:
            NotRepeatable: The run did not repeat its prefix.
        """
        if self.mismatch is not None:
            raise self.mismatch
        if len(trace.steps) < len(self._nodes):
            node = self._nodes[len(trace.steps)]
            raise NotRepeatable(len(trace.steps), list(node.possible.values()), [])
        for step in trace.steps[self._prefix :]:
            for earlier, clock in step.races:
                self._reverse(trace.steps, earlier, step.index, step.offer, clock)
        if not trace.is_cut:
            for offer in trace.pending:
                for earlier, clock in trace.examine(offer)[0]:
                    self._reverse(trace.steps, earlier, len(trace.steps), offer, clock)
        for other in trace.alternatives:
            if other.id in self._nodes[other.index].possible:
                self._add(other.index, [other.id])
            else:
                self._insert(other.index, self._before(trace.steps, other.index, other.clock))

    def next_run(self) -> bool:
        """Prepare the next run; return False if no order is left."""
        while self._nodes:
            node = self._nodes[-1]
            if left := node.remaining():
                node.done.add(node.chosen)
                node.chosen = left[0] if self._shuffle is None else self._shuffle.choice(left)
                self._prefix = len(self._nodes) - 1
                return True
            self._nodes.pop()
        self.is_exhausted = True
        return False

    @property
    def least_classes(self) -> int:
        """Return a number of classes that the open branches of the current run promise: a lower bound."""
        product = 1
        for node in self._nodes:
            product *= max(1, len(set(node.todo) - set(node.sleep)))
        return product

    def _reverse(self, steps: Sequence[Step], earlier: int, later: int, offer: NextOperation, clock: Clock) -> None:
        """Have *offer*, which is step *later*, go before step *earlier* once."""
        first = steps[earlier]
        between = [step for step in steps[earlier + 1 : later] if not first.precedes(step.clock)]
        ids = _initials(between)
        if not any(step.precedes(clock) for step in between):
            ids.append(offer.id)
        self._insert(earlier, ids)

    @staticmethod
    def _before(steps: Sequence[Step], index: int, clock: Clock) -> list[str]:
        """Return the operations with which can begin what *clock* needs after step *index*."""
        first = steps[index]
        needed = [step for step in steps[index + 1 :] if step.precedes(clock) and not first.precedes(step.clock)]
        return _initials(needed)

    def _insert(self, index: int, ids: Sequence[str]) -> None:
        node = self._nodes[index]
        if any(one in node.todo for one in ids):
            return
        possible = [one for one in node.possible if one in ids]
        self._add(index, possible[:1] or node.possible)

    def _add(self, index: int, ids: Iterable[str]) -> None:
        node = self._nodes[index]
        node.todo += [one for one in ids if one not in node.todo and one in node.possible]


def _initials(steps: Sequence[Step]) -> list[str]:
    """Return the operations of *steps* that none of the others precedes."""
    return [
        step.offer.id
        for at, step in enumerate(steps)
        if not any(includes(step.clock, other.offer.actor, other.number) for other in steps[:at])
    ]
