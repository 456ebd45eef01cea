"""What a stream holds: kernels, marks, waits for marks, and communication kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["NEVER", "Comm", "Item", "Kernel", "Load", "Mark", "Wait"]

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Load:
    """What a communication kernel takes from the kernels beside it, as shares of the device."""

    multiprocessors: float = 0.0
    memory_bandwidth: float = 0.0


@dataclass(slots=True, eq=False)
class Kernel:
    """Work of *seconds* on an idle device that cannot begin before the host has launched it."""

    seconds: float
    launched_s: float
    memory_bound: bool = False
    name: Any = ""
    begun_s: float | None = None
    ended_s: float | None = None
    on_end: Callable[[Kernel], None] | None = None
    kind: str = ""
    """As Cost.kind."""


@dataclass(slots=True, eq=False)
class Mark:
    """A point in a stream: torch.cuda.Event, or the end of what was put in."""

    launched_s: float
    reached_s: float | None = None
    waiters: list[Callable[[], None]] = field(default_factory=list)
    on_reach: Callable[[Mark], None] | None = None
    """Called when it is found to be reached, later than that moment where nobody looked: for accounts."""


@dataclass(slots=True, eq=False)
class Wait:
    """What follows begins when *mark*, of another stream, has been reached."""

    mark: Mark
    launched_s: float


@dataclass(slots=True, eq=False)
class Comm:
    """A communication kernel: *begin* is called when its turn comes; `Timeline.end` when the network is done."""

    launched_s: float
    load: Load
    begin: Callable[[Comm], None]
    record: Any = None
    """The call that it carries out."""
    records: Sequence[Any] = ()
    """All of them: a batch has several."""
    expires_s: float = NEVER
    """When the program no longer waits for it."""
    waits: bool = False
    """Its peers have not come: it holds its SMs, and moves nothing through memory."""
    explicit: bool = False
    """The program has set that limit itself."""
    behind: Mark | None = None
    """The point in its stream at which it has ended."""
    exposed_s: float = 0.0
    """How long its bytes moved while nothing computed."""
    begun_s: float | None = None
    ended_s: float | None = None


Item = Kernel | Mark | Wait | Comm
