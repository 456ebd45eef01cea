"""A fault: the rule that a user writes, plain data, and the rule at work in one world.

Each fault has a file of its own, named as users name it (`what`), with both. The fields of the rule are the keys of
the fault's table in a scenario file: their types and bounds say what is accepted, their docstrings stand in the JSON
schema and in the reference. The simulator asks all faults at each place where something can go wrong; a fault answers
where it has something to say, and is not asked elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from annotated_types import Ge

from distsim.debug.records import CallRecord, Finding
from distsim.errors import UsageError
from distsim.sim.faults.moment import When

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.c10d.arrival import Arrival
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.isolation.process import RankTask, SimProcess
    from distsim.sim.world import World

__all__ = ["Fault", "Rank", "Rule", "check_ranks", "later"]

Rank = Annotated[int, Ge(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """What goes wrong, where, when and for how long; `str` is what reports say of it."""

    path: str = "faults"
    """Where the rule stands in its file, for messages."""
    when: When = field(default_factory=When)
    """Its fields are keys of the fault's table, too."""

    @abstractmethod
    def planted(self, world: World, number: int, links: LinkState) -> Fault[Any]:
        """The fault that it is in *world*, whose links are *links*; *number* is its place among the rules."""

    @abstractmethod
    def check(self, cluster: Cluster, world_size: int) -> None:
        """Raise `UsageError` where it names what is not there."""


R = TypeVar("R", bound=Rule)


class Fault(Generic[R]):
    """A rule at work in one world."""

    def __init__(self, rule: R, world: World, number: int) -> None:
        self.rule = rule
        self.world = world
        self.number = number
        self.struck_s: float | None = None
        """When it first struck."""

    def hit(self) -> None:
        """It strikes now."""
        if self.struck_s is None:
            self.struck_s = float(self.world.env.now)

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        later(self.world, delay_s, call)

    # -- what the simulator asks

    def begin(self) -> None:
        """The world has its processes and has not run yet: clocks are set."""

    def on_call(self, task: RankTask, record: CallRecord) -> None:
        """In the rank's own thread: it has made a call, which has not reached the others yet."""

    def on_start(self, members: Sequence[Arrival]) -> None:
        """A call has all its members: its first byte moves now."""

    def after_data(self, members: Sequence[Arrival]) -> None:
        """The members' outputs are written, and nobody has read them."""

    def compute_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        """How long an operator takes here that takes *seconds* elsewhere."""
        return seconds

    def host_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        """How long the host takes to launch here what takes it *seconds* elsewhere."""
        return seconds

    def kernel_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        """How long a kernel takes on this rank's GPU that takes *seconds* elsewhere; it is launched at *start_s*."""
        return seconds

    def on_access(self, task: RankTask, path: str) -> None:
        """In the rank's own thread: it opens, loads or saves a file."""

    def on_connect(self, task: RankTask, host_name: str, port: int, timeout: timedelta, explicit: bool) -> None:
        """In the rank's own thread: it opens its connection to the store."""

    def findings(self) -> list[Finding]:
        """What a guard with an eye on it would have seen by now."""
        return []


def later(world: World, delay_s: float, call: Callable[[], None]) -> None:
    """*call* after *delay_s*, at once if that is nothing."""
    if delay_s <= 0.0:
        call()
        return
    timer = world.env.timeout(delay_s)
    assert timer.callbacks is not None
    timer.callbacks.append(lambda _: call())


def check_ranks(ranks: Sequence[int], world_size: int) -> None:
    """Raise `UsageError` where one of *ranks* is not there."""
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside:
        raise UsageError(f"no rank {outside[0]}: the world has ranks 0 to {world_size - 1}")
