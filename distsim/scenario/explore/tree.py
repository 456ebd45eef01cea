"""Depth-first search over runs: one for each class of orders (source-DPOR).

Source: Abdulla, Aronis, Jonsson, Sagonas, "Optimal dynamic partial order reduction", POPL 2014, algorithm 1.

Two additions: which message a receive from any source takes is no order of sends, so its alternatives are determined at
the end of a run. And the operations that tasks were about to do when a run ended count in races, because a run that
stops at a mismatch or a deadlock would hide orders.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distsim.sim.kernel.clocks import Clock, includes
from distsim.sim.kernel.steps import NextOperation, Step, Trace, dependent


class NotRepeatable(Exception):
    """The program does something else after the same choices.

    Args:
        step: Number of the first different step; -1 if only what it prints is different.
        before: What was possible there before.
        now: What is possible now.
        difference: What is different in what it prints.
    """

    def __init__(
        self, step: int, before: Sequence[NextOperation], now: Sequence[NextOperation], difference: str = ""
    ) -> None:
        self.step, self.before, self.now, self.difference = step, before, now, difference
        super().__init__(f"step {step}")


class Branch:
    """Chooser of one run of a tree: some operations in their order, then the usual order without those that are asleep.

    It may go to another process and come back with what was possible.

    Args:
        number: Number of the run.
        prefix: Operations that the run repeats.
        sleep: Operations that need no run after them: all their orders are explored elsewhere.
    """

    def __init__(self, number: int, prefix: Sequence[str], sleep: Mapping[str, NextOperation]) -> None:
        self.number = number
        self.prefix = prefix
        self.possible: list[dict[str, NextOperation]] = []
        """What was possible at each step, in the usual order."""
        self.sleeping = [dict(sleep)]
        """What was asleep at each step below the prefix."""

    def choose(self, steps: Sequence[Step], offers: Sequence[NextOperation]) -> NextOperation | None:
        """Return the operation of the prefix, below it the first in the usual order that is not asleep."""
        possible = {offer.id: offer for offer in offers}
        self.possible.append(possible)
        if len(steps) < len(self.prefix):
            return possible.get(self.prefix[len(steps)])
        if len(steps) > len(self.prefix):
            self.sleeping.append(_independent(self.sleeping[-1], steps[-1].offer))
        return next((offer for offer in offers if offer.id not in self.sleeping[-1]), None)


@dataclass(slots=True, eq=False)
class _Node:
    """A moment of some runs at which something was chosen."""

    parent: _Node | None
    after: str
    """Operation chosen at its parent."""
    possible: dict[str, NextOperation]
    """The operations that were possible, in the usual order."""
    sleep: dict[str, NextOperation]
    """Operations that need no run from here."""
    todo: list[str]
    """Operations that must be chosen here once, with those that were."""
    begun: list[str]
    """Operations that were chosen here, in their order."""

    def path(self) -> list[_Node]:
        """Return the nodes from the root to this one."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def remaining(self) -> list[str]:
        """Return what is still to be chosen here."""
        return [one for one in self.todo if one not in self.begun and one not in self.sleep]

    def asleep_below(self, chosen: str) -> dict[str, NextOperation]:
        """Return the operations that need no run after *chosen*: they have one before it."""
        explored = self.sleep | {one: self.possible[one] for one in self.begun}
        return _independent(explored, self.possible[chosen])


def _independent(sleep: Mapping[str, NextOperation], chosen: NextOperation) -> dict[str, NextOperation]:
    return {one: offer for one, offer in sleep.items() if not dependent(offer, chosen)}


class OrderTree:
    """The orders of one program, explored branch by branch; several may be under way at a time."""

    def __init__(self) -> None:
        self._open: list[tuple[int, int, _Node]] = []
        """Heap of the nodes at which something is still to be chosen, the deepest first."""
        self._under_way: dict[int, _Node | None] = {}
        """Node at which each run leaves the runs before it."""
        self._shuffle: random.Random | None = None
        self.num_begun = self._num_opened = 0
        self._last: list[_Node] = []
        """Nodes of the run that ended last."""

    @property
    def is_exhausted(self) -> bool:
        """Return whether no order is left."""
        return self.num_begun > 0 and not self._under_way and self._next_node() is None

    def shuffle(self, source: random.Random) -> None:
        """Take branches in random order from now on, because not all of them can be taken."""
        self._shuffle = source

    def begin_run(self) -> Branch | None:
        """Return the chooser of a further run; None if there is none until another one has ended."""
        node = self._next_node() if self.num_begun else None
        if node is None and self.num_begun:
            return None
        number = self.num_begun = self.num_begun + 1
        self._under_way[number] = node
        if node is None:
            return Branch(number, [], {})
        left = node.remaining()
        chosen = left[0] if self._shuffle is None else self._shuffle.choice(left)
        sleep = node.asleep_below(chosen)
        node.begun.append(chosen)
        return Branch(number, [*(one.after for one in node.path()[1:]), chosen], sleep)

    def end_run(self, trace: Trace) -> None:
        """Find out what must be tried because of a run that has ended; its chooser is from `begin_run`.

        Raises:
            NotRepeatable: The run did not repeat its prefix.
        """
        branch = trace.chooser
        assert isinstance(branch, Branch)
        nodes = self._nodes_of(branch, trace.steps)
        for step in trace.steps[max(0, len(branch.prefix) - 1) :]:
            for earlier, clock in step.races:
                self._reverse(trace.steps, nodes, earlier, step.index, step.offer, clock)
        if not trace.is_cut:
            for offer in trace.pending:
                for earlier, clock in trace.examine(offer)[0]:
                    self._reverse(trace.steps, nodes, earlier, len(trace.steps), offer, clock)
        for other in trace.alternatives:
            node = nodes[other.index]
            if other.id in node.possible:
                self._add(node, [other.id])
            else:
                self._insert(node, self._before(trace.steps, other.index, other.clock))
        self._last = nodes

    @property
    def least_classes(self) -> int:
        """Return a number of classes that the open branches of the last run promise: a lower bound."""
        product = 1
        for node in self._last:
            product *= max(1, len(set(node.todo) - set(node.sleep)))
        return product

    def _next_node(self) -> _Node | None:
        """Return the deepest node at which something is still to be chosen."""
        while self._open and not self._open[0][-1].remaining():
            heapq.heappop(self._open)
        return self._open[0][-1] if self._open else None

    def _nodes_of(self, branch: Branch, steps: Sequence[Step]) -> list[_Node]:
        """Return the nodes of a run that has ended, of which those below its prefix are new."""
        node = self._under_way.pop(branch.number)
        nodes = [] if node is None else node.path()
        for depth, node in enumerate(nodes):
            now = branch.possible[depth] if depth < len(branch.possible) else {}
            if now != node.possible:
                raise NotRepeatable(depth, list(node.possible.values()), list(now.values()))
        for depth in range(len(nodes), len(steps)):
            parent, after = (nodes[-1], steps[depth - 1].offer.id) if nodes else (None, "")
            sleep, chosen = branch.sleeping[depth - len(branch.prefix)], steps[depth].offer.id
            nodes.append(_Node(parent, after, branch.possible[depth], sleep, [chosen], [chosen]))
        return nodes

    def _reverse(
        self,
        steps: Sequence[Step],
        nodes: Sequence[_Node],
        earlier: int,
        later: int,
        offer: NextOperation,
        clock: Clock,
    ) -> None:
        """Have *offer*, which is step *later*, go before step *earlier* once."""
        first = steps[earlier]
        between = [step for step in steps[earlier + 1 : later] if not first.precedes(step.clock)]
        ids = _initials(between)
        if not any(step.precedes(clock) for step in between):
            ids.append(offer.id)
        self._insert(nodes[earlier], ids)

    @staticmethod
    def _before(steps: Sequence[Step], index: int, clock: Clock) -> list[str]:
        """Return the operations with which can begin what *clock* needs after step *index*."""
        first = steps[index]
        needed = [step for step in steps[index + 1 :] if step.precedes(clock) and not first.precedes(step.clock)]
        return _initials(needed)

    def _insert(self, node: _Node, ids: Sequence[str]) -> None:
        if any(one in node.todo for one in ids):
            return
        possible = [one for one in node.possible if one in ids]
        self._add(node, possible[:1] or node.possible)

    def _add(self, node: _Node, ids: Iterable[str]) -> None:
        new = [one for one in ids if one not in node.todo and one in node.possible]
        if new:
            node.todo += new
            self._num_opened += 1
            heapq.heappush(self._open, (1 - len(node.path()), self._num_opened, node))


def _initials(steps: Sequence[Step]) -> list[str]:
    """Return the operations of *steps* that none of the others precedes."""
    return [
        step.offer.id
        for at, step in enumerate(steps)
        if not any(includes(step.clock, other.offer.actor, other.number) for other in steps[:at])
    ]
