"""A fault: its rule, which the user writes as plain data, and the fault at work in one world.

The fields of a rule are the keys of the fault's table in a scenario file, whose key `what` names the fault: their
types and bounds validate the file, and their docstrings appear in the JSON schema and the reference. The simulator
calls all faults at every point where something can go wrong; a fault overrides the methods that concern it.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

from annotated_types import Ge

from distsim.debug.records import CallRecord, Finding
from distsim.errors import UsageError
from distsim.text.untrusted_input import brief

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.cluster.graph.link import Slot
    from distsim.sim.c10d.work import Arrival
    from distsim.sim.isolation.process import RankTask, SimProcess
    from distsim.sim.world import World

# -- When a fault strikes: at a time or at a call, some time after it, and for how long.
#
# Times are virtual seconds since the run began.

_POINT = re.compile(r"(?:(?P<op>[a-z_]+)\s*)?#(?P<number>\d+)(?:\s+on\s+(?P<group>\S+))?")


@dataclass(frozen=True, slots=True)
class CallPoint:
    """A call as reports name it, such as `all_reduce #3 on dp`.

    Without an operation it is a rank's call of that number over all its groups: `#7` is its seventh call after
    init_process_group.
    """

    number: int
    op: str | None = None
    group: str | None = None

    @classmethod
    def parse(cls, text: str | int) -> CallPoint:
        word = brief(text, 300)
        match = _POINT.fullmatch(f"#{word}" if isinstance(text, int) else word.strip())
        if match is None:
            raise UsageError(
                f"expected a call such as 'all_reduce #3', 'all_reduce #3 on dp' or '#7', got {brief(text)!r}"
            )
        op, group = match["op"], match["group"]
        if group is not None and op is None:
            raise UsageError(f"expected an operation before the group, as 'all_reduce #3 on dp', got {brief(text)!r}")
        return cls(int(match["number"]), op, group)

    def matches(self, record: CallRecord) -> bool:
        if self.op is None:
            return record.index == self.number
        if (record.op, record.seq) != (self.op, self.number):
            return False
        return self.group is None or self.group in (record.group.label, record.group.name)

    def __str__(self) -> str:
        text = f"#{self.number}" if self.op is None else f"{self.op} #{self.number}"
        return text if self.group is None else f"{text} on {self.group}"


@dataclass(frozen=True, slots=True)
class When:
    """Time at which a fault strikes (a virtual time or a call, with a delay), and its duration."""

    at_s: Annotated[float, Ge(0)] | None = None
    """Virtual time at which it strikes (default: from the start)."""
    call: CallPoint | None = None
    """The call at which it strikes: 'all_reduce #3', 'all_reduce #3 on dp', or a rank's n-th."""
    after_s: Annotated[float, Ge(0)] = 0.0
    """Strike this long after the time or call."""
    for_s: Annotated[float, Ge(0)] | None = None
    """Duration (default: until the end)."""

    def __post_init__(self) -> None:
        if self.at_s is not None and self.call is not None:
            raise UsageError("expected at_s or call, got both")

    @property
    def start_s(self) -> float:
        """Return the virtual time at which the fault strikes, if it does not wait for a call."""
        return (self.at_s or 0.0) + self.after_s

    @property
    def end_s(self) -> float:
        return math.inf if self.for_s is None else self.start_s + self.for_s

    def __str__(self) -> str:
        if self.call is not None:
            text = f"at {self.call}"
            if self.after_s:
                text = f"{self.after_s:g} s after {self.call}"
        else:
            text = f"at {self.start_s:g} s" if self.start_s else "from the start"
        return text if self.for_s is None else f"{text} for {self.for_s:g} s"


Rank = Annotated[int, Ge(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """A fault as the user writes it: kind, target, time and duration. `str` gives its text in reports."""

    what: ClassVar[str]
    """Name of the fault in a scenario file. A rule without a name is a base class."""
    path: str = "faults"
    """Path of the rule in its file, for messages."""
    when: When = field(default_factory=When)
    """Time and duration; its fields are keys of the fault's table, too."""

    fault: ClassVar[type[Fault[Any]]]
    """The rule at work, which names it: `class _Crash(Fault[Crash], rule=Crash)`."""

    def planted(self, world: World, number: int) -> Fault[Any]:
        """Return the fault of this rule in *world*. *number* is the rule's index."""
        return self.fault(self, world, number)

    def touches(self, slots: Sequence[Slot]) -> Sequence[int]:
        """Return the ranks, with places *slots*, that differ from others by the fault; a sample of the ranks contains
        them."""
        return ()

    @abstractmethod
    def check(self, cluster: Cluster, world_size: int) -> None:
        """Raise `UsageError` if the rule names something that the cluster or the job does not have."""


R = TypeVar("R", bound=Rule)


class Fault(Generic[R]):
    """A rule at work in one world."""

    def __init_subclass__(cls, rule: type[Rule] | None = None) -> None:
        if rule is not None:
            rule.fault = cls

    def __init__(self, rule: R, world: World, number: int) -> None:
        self.rule = rule
        self.world = world
        self.number = number
        self.struck_s: float | None = None
        """Virtual time at which the fault first had an effect; None before that."""

    def hit(self) -> None:
        """Strike now."""
        if self.struck_s is None:
            self.struck_s = self.world.now_s

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        later(self.world, delay_s, call)

    # -- what the simulator asks

    def begin(self) -> None:
        """Called when the world has its processes and has not run yet."""

    def on_call(self, task: RankTask, record: CallRecord) -> None:
        """Called in the rank's thread after it made a call that has not reached the other members yet."""

    def on_start(self, members: Sequence[Arrival]) -> None:
        """Called when all members of a call have arrived, before its first byte moves."""

    def after_data(self, members: Sequence[Arrival]) -> None:
        """Called when the members' outputs are written, before any rank reads them."""

    def compute_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        """Return the seconds of an operator that takes *seconds* without the fault."""
        return seconds

    def host_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        """Return the seconds of a launch on the host that takes *seconds* without the fault."""
        return seconds

    def kernel_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        """Return the seconds of a kernel on this rank's GPU that takes *seconds* without the fault and is launched at
        *start_s*."""
        return seconds

    def on_access(self, task: RankTask, path: str) -> None:
        """Called in the rank's thread when it opens, loads or saves a file."""

    def on_connect(self, task: RankTask, host_name: str, port: int, timeout: timedelta, explicit: bool) -> None:
        """Called in the rank's thread when it connects to the store."""

    def findings(self) -> list[Finding]:
        """Return what a guard on real hardware would have found by now."""
        return []


def later(world: World, delay_s: float, call: Callable[[], None]) -> None:
    """Run *call* after *delay_s*, or immediately if there is no delay."""
    if delay_s <= 0.0:
        call()
        return
    timer = world.timer(delay_s)
    assert timer.callbacks is not None
    timer.callbacks.append(lambda _: call())


def check_ranks(ranks: Sequence[int], world_size: int) -> None:
    """Raise `UsageError` if one of *ranks* does not exist."""
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside:
        raise UsageError(f"no rank {outside[0]}: the world has ranks 0 to {world_size - 1}")


class Lasting(Fault[R]):
    """A fault that lasts for a time, from a virtual time or from the first call of one of its ranks."""

    def __init__(self, rule: R, world: World, number: int) -> None:
        super().__init__(rule, world, number)
        self._from_s = rule.when.start_s if rule.when.call is None else math.inf

    def on_call(self, task: RankTask, record: CallRecord) -> None:
        when = self.rule.when
        if when.call is not None and self._from_s == math.inf and when.call.matches(record):
            self._from_s = task.now_s() + when.after_s

    @property
    def until_s(self) -> float:
        """Return the time at which the fault ends; infinite if it never ends or has not begun."""
        return math.inf if self.rule.when.for_s is None else self._from_s + self.rule.when.for_s

    def active(self, now_s: float) -> bool:
        """Return whether the fault is active at *now_s* of the rank's own clock.

        That clock is ahead of the world's clock while the rank computes.
        """
        return self._from_s <= now_s < self.until_s
