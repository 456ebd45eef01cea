"""The steps of one run whose order no rule fixes, and the races between them."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distsim.sim.kernel.clocks import Clock, includes, joined

# -- Two operations of different actors are dependent if they access one object and their accesses conflict. Nothing
# else makes them dependent, and the order of independent operations makes no difference to the program.


class Access(enum.IntEnum):
    """How an operation accesses an object."""

    READ = 0
    WRITE = 1
    """Conflicts with every access."""
    ADD = 2
    """Adds a part (a key of a store). Conflicts with READ, which sees all parts, and not with another ADD."""
    USE = 3
    """Needs the object to exist. Conflicts with WRITE only, which ends it."""


Objects = Mapping[Hashable, Access]


def conflict(first: Access, second: Access) -> bool:
    """Return whether the order of two accesses of one object makes a difference."""
    return first is Access.WRITE or second is Access.WRITE or {first, second} == {Access.READ, Access.ADD}


@dataclass(frozen=True, slots=True)
class NextOperation:
    """An operation that may go next."""

    id: str
    """Name within the moment: `1.0` the operation of thread 0 of rank 1, `0<2#1` rank 0 receives message 1 of rank 2,
    `1.0!` the wait of that thread expires, `1.0?` it asks for something that is not there yet, `0@1.0#2` worker 0
    serves the second call of that thread, `p0.0#2#1` thread 1 of the second process that thread 0 of rank 0 started."""
    actor: str
    """Whose operations are in a fixed order: a task, or a mailbox."""
    objects: Objects
    order: tuple[int, ...]
    """Position among the operations that are possible at one moment, by name."""
    label: str = ""
    """What it does, as the program names it: `get "attempt"`."""
    line: str = ""
    """Where the program does it: `file.py:12`."""
    clock: Clock = field(default_factory=dict, compare=False)
    """Clock of the actor before the operation."""
    enablers: frozenset[int] = field(default=frozenset(), compare=False)
    """Numbers of the steps without which it would not be possible."""
    released: Clock = field(default_factory=dict, compare=False)
    """Clock of what made it possible without being a step: the release of a lock."""
    repeats: bool = field(default=False, compare=False)
    """Whether it looks again at what its loop has looked at before."""
    expires: bool = False
    """Whether a wait reaches its limit, or a question is answered by "not yet"."""

    @property
    def rank(self) -> str:
        """Return the rank of its actor."""
        return self.actor.partition(".")[0].partition("<")[0].partition("@")[0]


def dependent(first: NextOperation, second: NextOperation) -> bool:
    """Return whether the order of two operations makes a difference."""
    if first.actor == second.actor:
        return True
    return any(
        there in second.objects and conflict(access, second.objects[there]) for there, access in first.objects.items()
    )


@dataclass(slots=True)
class Step:
    """One operation of a run, after it was chosen."""

    index: int
    offer: NextOperation
    number: int
    """How many operations of its actor there were, with this one."""
    clock: Clock
    """Clock after it."""
    usual: str
    """Operation that the usual order would have taken."""
    races: list[tuple[int, Clock]]
    """Earlier steps with which its order could be reversed, and its clock without those before them."""

    def precedes(self, clock: Clock) -> bool:
        """Return whether it happens before what has *clock*."""
        return includes(clock, self.offer.actor, self.number)


class Chooser(Protocol):
    """Decides which operation goes next."""

    def choose(self, steps: Sequence[Step], offers: Sequence[NextOperation]) -> NextOperation | None:
        """Return one of *offers*, which are in the usual order, or None to end the run here."""
        ...


@dataclass(frozen=True, slots=True)
class Alternative:
    """Operation *id* could have been instead of step *index*."""

    index: int
    id: str
    clock: Clock
    """What the operation needs before it is possible."""


class Trace:
    """The steps of one run. At its end also what could have been instead."""

    def __init__(self, chooser: Chooser) -> None:
        self.chooser = chooser
        self.steps: list[Step] = []
        self.is_cut = False
        """Whether the chooser ended the run."""
        self.pending: list[NextOperation] = []
        """What tasks were about to do when the run ended."""
        self.alternatives: list[Alternative] = []
        self.polls: dict[str, None] = {}
        """Lines of loops that look at one thing until it changes."""
        self.clocks: dict[str, None] = {}
        """Lines that read a clock."""
        self.unexplored: dict[str, None] = {}
        """What the program does whose order is not a choice."""
        self.sometimes: dict[str, bool] = {}
        """What the program expects to hold in some orders, and whether it held in this one."""
        self.calls: dict[int, int] = {}
        """Calls and operations by rank, each of which is a place where the rank could die."""
        self._accesses: dict[Hashable, list[tuple[Step, Access]]] = {}
        self._numbers: dict[str, int] = {}

    def take(self, offers: Sequence[NextOperation]) -> Step | None:
        """Let the chooser choose among *offers*, and record the step; None if it ends the run."""
        last = self.steps[-1].offer.actor if self.steps else ""
        usual = sorted(offers, key=lambda offer: (offer.expires, offer.actor != last, offer.order))
        chosen = self.chooser.choose(self.steps, usual)
        if chosen is None:
            self.is_cut = True
            return None
        races, clock = self.examine(chosen)
        number = self._numbers[chosen.actor] = self._numbers.get(chosen.actor, 0) + 1
        step = Step(len(self.steps), chosen, number, {**clock, chosen.actor: number}, usual[0].id, races)
        self.steps.append(step)
        for there, access in chosen.objects.items():
            self._accesses.setdefault(there, []).append((step, access))
        return step

    def last_change(self, objects: Objects) -> int:
        """Return the number of the last step that changed one of *objects*; -1 if none has."""
        changes = (
            step.index
            for there in objects
            for step, access in self._accesses.get(there, ())
            if access in (Access.WRITE, Access.ADD)
        )
        return max(changes, default=-1)

    def examine(self, offer: NextOperation) -> tuple[list[tuple[int, Clock]], Clock]:
        """Return the races of *offer* with earlier steps, as if it went now, and its clock."""
        earlier: dict[int, Step] = {}
        for there, access in offer.objects.items():
            for step, other in reversed(self._accesses.get(there, ())):
                if conflict(access, other):
                    earlier[step.index] = step
                    if other is Access.WRITE and step.index not in offer.enablers:
                        break  # all earlier accesses happen before it
        races: list[tuple[int, Clock]] = []
        ordered = known = offer.clock
        for index in sorted(earlier, reverse=True):
            step = earlier[index]
            if step.precedes(ordered):
                continue
            known = joined(known, step.clock)
            if index in offer.enablers:  # cannot be reversed; what precedes it perhaps can
                continue
            if not offer.repeats and not step.offer.repeats:
                races.append((index, known))
            ordered = joined(ordered, step.clock)
        return races, joined(known, offer.released)


def class_of(trace: Trace) -> int:
    """Return a number of the class of the run: equal for runs that differ only in the order of independent steps."""
    parts: set[Hashable] = set()
    accesses: dict[Hashable, list[tuple[Hashable, Access]]] = {}
    for step in trace.steps:
        name = step.offer.actor, step.number, step.offer.id
        parts.add(name)
        for there, access in step.offer.objects.items():
            others = accesses.setdefault(there, [])
            for other, before in reversed(others):
                if conflict(access, before):
                    parts.add((other, name))
                    if before is Access.WRITE:
                        break
            others.append((name, access))
    return hash(frozenset(parts))
