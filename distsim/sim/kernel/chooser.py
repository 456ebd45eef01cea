"""Chooses the next operation: the usual one, that of a replay, or a random one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distsim.errors import UsageError
from distsim.sim.kernel.steps import Chooser, NextOperation, Step, Trace
from distsim.text.untrusted_input import brief


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault of an exploration, before a call of a rank."""

    kind: str
    """Its kind (STRIKES)."""
    rank: int
    call: int
    """Number of the call, from 1."""

    def __str__(self) -> str:
        return STRIKES[self.kind].format(rank=self.rank, call=self.call)


STRIKES = {
    "kill": "rank {rank} dies before its call number {call}",
    "store-loss": "the stores are lost before call number {call} of rank {rank}",
}
"""Kinds of faults, and what happens."""


@dataclass(slots=True)
class Orders:
    """How one run orders what no rule orders. Its trace is that of the run."""

    chooser: Chooser
    buffered: bool = False
    """Whether a send ends at once, as small ones do on NCCL and MPI. Otherwise it ends when its receiver has arrived,
    as on gloo."""
    strikes: tuple[Strike, ...] = ()
    """Faults, at most one of a kind for a rank."""
    explores_timeouts: bool = False
    """Whether a limit that the program set may strike before the event comes."""
    trace: Trace = field(init=False)

    def __post_init__(self) -> None:
        self.trace = Trace(self.chooser)


class Usual:
    """Go on with the task that went last; else take the first by name."""

    def choose(self, steps: Sequence[Step], offers: Sequence[NextOperation]) -> NextOperation | None:
        """Return the first offer."""
        return offers[0]


class Replay:
    """The usual order, except at the steps for which *choices* names an operation."""

    def __init__(self, choices: Mapping[int, str], strict: bool = True, flag: str = "--replay") -> None:
        self.choices = choices
        self._strict, self._flag = strict, flag

    def choose(self, steps: Sequence[Step], offers: Sequence[NextOperation]) -> NextOperation | None:
        """Return the operation that is asked for.

        Raises:
            UsageError: It is not possible, unless the replay is not strict.
        """
        wanted = self.choices.get(len(steps))
        if wanted is None:
            return offers[0]
        for offer in offers:
            if offer.id == wanted:
                return offer
        if not self._strict:
            return offers[0]
        possible = ", ".join(f"{offer.id} ({offer.label})" for offer in offers[:6])
        raise UsageError(
            f"{self._flag}: step {len(steps)}: expected an operation that is possible there, got {wanted}; possible: "
            f"{possible}. The string is of another program, or of another version of it"
        )


class Priorities:
    """PCT: actors have random priorities, of which some fall at random steps; the highest possible one goes.

    Source: Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding bugs", ASPLOS 2010.
    """

    def __init__(self, seed: int, num_steps: int, depth: int) -> None:
        self._random = random.Random(seed)
        self._priorities: dict[str, float] = {}
        self._changes = {self._random.randrange(max(1, num_steps)): -1.0 - i for i in range(depth - 1)}

    def choose(self, steps: Sequence[Step], offers: Sequence[NextOperation]) -> NextOperation | None:
        """Return the offer of the actor with the highest priority; a match has its sender's."""
        for actor in sorted({self.actor(offer) for offer in offers}):
            self._priorities.setdefault(actor, self._random.random())
        best = max(offers, key=lambda offer: self._priorities[self.actor(offer)])
        fallen = self._changes.get(len(steps))
        if fallen is not None:
            self._priorities[self.actor(best)] = fallen
            best = max(offers, key=lambda offer: self._priorities[self.actor(offer)])
        return best

    @staticmethod
    def actor(offer: NextOperation) -> str:
        """Return the name of who has the priority of an operation."""
        if offer.expires:
            return offer.id
        _, arrow, sender = offer.id.partition("<")
        return sender.partition("#")[0] + ".0" if arrow else offer.actor


class Drawn:
    """Each choice is an index that *draw* returns: below its argument, 0 for the usual order."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def choose(self, steps: Sequence[Step], offers: Sequence[NextOperation]) -> NextOperation | None:
        """Return the offer that is drawn; a single one is not drawn."""
        return offers[0] if len(offers) == 1 else offers[self._draw(len(offers))]


# -- The replay string: x1:[buffered,][timeouts,][dies=RANK@CALL,|loses=RANK@CALL,]STEP=OPERATION,...[-HASH]. Operations
# of the usual order are left out.

VERSION = 1
_STRING = re.compile(r"x(\d{1,4}):([^-]*)(?:-([0-9a-f]{4,16}))?")
_TASK = r"p?(?:\d{1,9}@){0,20}p?\d{1,9}\.\d{1,9}(?:#\d{1,9}){0,20}"
_CHOICE = re.compile(rf"(\d{{1,9}})=({_TASK}[!?]?|\d{{1,9}}<\d{{1,9}}#\d{{1,9}})")
_STRIKE = re.compile(r"(dies|loses)=(\d{1,9})@(\d{1,9})")
_KINDS = {"dies": "kill", "loses": "store-loss"}


@dataclass(frozen=True, slots=True)
class ReplayString:
    """The choices of one run as text."""

    choices: Mapping[int, str] = field(default_factory=dict)
    """Operation by step, where it is not the usual one."""
    buffered: bool = False
    strikes: tuple[Strike, ...] = ()
    explores_timeouts: bool = False
    program: str = ""
    """Hash of the program; empty if it is not checked."""
    flag: str = field(default="--replay", compare=False)
    """The flag that has the string, for messages."""

    @classmethod
    def parse(cls, text: str, flag: str = "--replay") -> ReplayString:
        """Return the inverse of `str`.

        Raises:
            UsageError: *text* is not a replay string of this version.
        """
        wrong = UsageError(
            f"{flag}: expected a string that an exploration prints, such as x1:4=1.0,9=0<2#1-7f3a or x1:buffered, "
            f"got {brief(text)!r}"
        )
        match = _STRING.fullmatch(text.strip()) if len(text) < 100_000 else None
        if match is None:
            raise wrong
        if int(match[1]) != VERSION:
            raise UsageError(f"{flag}: expected version x{VERSION}, got x{match[1]}: explore again with this distsim")
        choices: dict[int, str] = {}
        buffered, strikes, timeouts = False, [], False
        for part in filter(None, match[2].split(",")):
            if part == "buffered":
                buffered = True
            elif part == "timeouts":
                timeouts = True
            elif (strike := _STRIKE.fullmatch(part)) is not None:
                strikes.append(Strike(_KINDS[strike[1]], int(strike[2]), int(strike[3])))
            elif (choice := _CHOICE.fullmatch(part)) is not None:
                choices[int(choice[1])] = choice[2]
            else:
                raise wrong
        return cls(choices, buffered, tuple(strikes), timeouts, match[3] or "", flag)

    @classmethod
    def of(cls, orders: Orders, program: str) -> ReplayString:
        """Return the string of a run that has ended."""
        unusual = {step.index: step.offer.id for step in orders.trace.steps if step.offer.id != step.usual}
        return cls(unusual, orders.buffered, orders.strikes, orders.explores_timeouts, program)

    def orders(self, strict: bool = True) -> Orders:
        """Return the orders of a run that repeats it."""
        return Orders(Replay(self.choices, strict, self.flag), self.buffered, self.strikes, self.explores_timeouts)

    def check_program(self, program: str, name: str) -> None:
        """Check that it is a string of the program whose hash is *program*.

        Args:
            program: Hash of the program that is to run.
            name: What the program is called there.

        Raises:
            UsageError: It has another hash. Or it has none, unless it names no operation of the program.
        """
        if not self.program and self != ReplayString(buffered=True):
            raise UsageError(
                f"{self.flag}: expected the whole string that an exploration prints, with the hash at its end "
                f"(x1:4=1.0-7f3a), got {brief(str(self))!r}"
            )
        if self.program and self.program != program:
            raise UsageError(
                f"{self.flag}: expected a string of {name} (hash {program}), got one of another program or of an "
                f"earlier version of it (hash {self.program}): explore again"
            )

    def check_reached(self, trace: Trace) -> None:
        """Check that a run which repeats it has come to its last choice.

        Raises:
            UsageError: The run ended before.
        """
        last = max(self.choices, default=-1)
        if last >= len(trace.steps):
            raise UsageError(
                f"{self.flag}: step {last}: expected {self.choices[last]}, but the run ended after {len(trace.steps)} "
                "steps. The string is of another program, or of another version of it"
            )

    def __str__(self) -> str:
        parts = ["buffered"] * self.buffered + ["timeouts"] * self.explores_timeouts
        words = {kind: word for word, kind in _KINDS.items()}
        parts += [f"{words[strike.kind]}={strike.rank}@{strike.call}" for strike in self.strikes]
        parts += [f"{step}={operation}" for step, operation in sorted(self.choices.items())]
        return f"x{VERSION}:{','.join(parts)}" + (f"-{self.program}" if self.program else "")
