"""Streams of one device in virtual time: items, their order, and the account of its seconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeVar

import simpy

from distsim.debug.records import CallRecord

__all__ = ["NEVER", "Account", "Comm", "Item", "Kernel", "Load", "Mark", "StreamTimeline", "StreamWait", "Timeline"]

# -- What a stream holds: kernels, marks, waits for marks, and communication kernels.

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Load:
    """Share of the device that a communication kernel takes from the kernels beside it."""

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
class StreamWait:
    """Wait until *mark* of another stream has been reached."""

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


Item = Kernel | Mark | StreamWait | Comm


# -- What one GPU did with its time: computed, waited for communication, for a peer's message, for its host.

_Name = TypeVar("_Name")


class Account:
    """Seconds of one device from its first use on. compute + exposed + bubble + host is all of its time."""

    __slots__ = ("bubble_s", "compute_s", "exposed_s", "host_s", "late_s", "operators", "overlapped_s",
                 "slowed_s", "waits")  # fmt: skip

    def __init__(self) -> None:
        self.compute_s = 0.0
        """At least one kernel that computes runs."""
        self.overlapped_s = 0.0
        """Of it: a communication kernel runs beside it."""
        self.slowed_s = 0.0
        """Of that: what the kernels would not have needed on a device of their own."""
        self.exposed_s = 0.0
        """Nothing computes, a communication kernel runs."""
        self.late_s = 0.0
        """Of it: a collective that some member has not come to yet."""
        self.bubble_s = 0.0
        """Nothing runs but a send or receive whose other end has not come yet."""
        self.host_s = 0.0
        """Nothing runs, and nothing is there to run: the host has not launched it yet."""
        self.operators: dict[Any, list[float]] = {}
        """Operator -> [how often, seconds] of its kernels."""
        self.waits: dict[tuple[str, str], list[float]] = {}
        """(operation, group) -> seconds of communication: [moving, late] that nothing hid (a bubble is late), [moving]
        of all of it, and what nothing hid that would not be with [half] of each call's moving."""

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s + self.bubble_s + self.host_s

    def snapshot(self) -> Account:
        """Return a copy of the current account."""
        taken = copy(self)
        taken.operators = {name: [*times] for name, times in self.operators.items()}
        taken.waits = {name: [*times] for name, times in self.waits.items()}
        return taken

    def since(self, before: Account) -> Account:
        """Return what was added since *before*, an earlier snapshot."""
        gone = Account()
        for name in ("compute_s", "overlapped_s", "slowed_s", "exposed_s", "late_s", "bubble_s", "host_s"):
            setattr(gone, name, getattr(self, name) - getattr(before, name))
        gone.operators = _since(self.operators, before.operators)
        gone.waits = _since(self.waits, before.waits)
        return gone

    def ran(self, name: Any, seconds: float) -> None:
        """A kernel of operator *name* is over, *seconds* after it began."""
        known = self.operators.get(name)
        if known is None:
            self.operators[name] = [1, seconds]
        else:
            known[0] += 1
            known[1] += seconds

    def overlapped(self, seconds: float, used: float) -> None:
        """Kernels ran beside communication, on the share *used* of the device."""
        self.overlapped_s += seconds
        self.slowed_s += seconds * (1.0 - used)

    def communicated(self, records: Sequence[CallRecord], begun_s: float, ended_s: float, exposed_s: float) -> None:
        """A communication kernel that carried out *records* is over; nothing hid *exposed_s* of its moving."""
        if records:
            moving_s, times = _moving_s(records, begun_s, ended_s), self._of(records[0])
            times[2] += moving_s
            times[3] += min(exposed_s, moving_s / 2)

    def _of(self, record: CallRecord) -> list[float]:
        return self.waits.setdefault((record.op, record.group.label), [0.0, 0.0, 0.0, 0.0])

    def waited(self, records: Sequence[CallRecord], from_s: float, to_s: float) -> float:
        """Account for time in which only a communication kernel for *records* ran, and return how long bytes moved."""
        if not records:
            self.exposed_s += to_s - from_s
            return to_s - from_s
        moving_s = _moving_s(records, from_s, to_s)
        late_s = max(0.0, to_s - from_s - moving_s)
        first = records[0]
        times = self._of(first)
        times[0] += moving_s
        times[1] += late_s
        self.exposed_s += moving_s
        if first.is_p2p:
            self.bubble_s += late_s
        else:
            self.exposed_s += late_s
            self.late_s += late_s
        return moving_s


def _since(now: dict[_Name, list[float]], before: dict[_Name, list[float]]) -> dict[_Name, list[float]]:
    result = {}
    for name, sums in now.items():
        was = before.get(name)
        if sums != was:
            result[name] = [*sums] if was is None else [n - w for n, w in zip(sums, was, strict=True)]
    return result


def _moving_s(records: Sequence[CallRecord], from_s: float, to_s: float) -> float:
    """Time between the two in which the bytes of at least one call moved."""
    total, end_s = 0.0, from_s
    spans = sorted(
        (r.started_s, to_s if r.completed_s is None else min(to_s, r.completed_s))
        for r in records
        if r.started_s is not None
    )
    for started_s, stop_s in spans:
        begin_s = max(started_s, end_s)
        if stop_s > begin_s:
            total += stop_s - begin_s
            end_s = stop_s
    return total


# -- One accelerator's streams in virtual time: what runs when, and how what runs at once slows each other.
#
# A stream runs its items one after another, as CUDA's do: kernels, marks, waits for marks of other streams, and
# communication kernels, which begin when their turn comes and end when the network says so. The host only puts items
# at the end; it waits for a mark where a program synchronizes.
#
# At once: a communication kernel holds SMs from its turn on, also while it waits for its peers, and memory bandwidth
# as soon as they have come: until then it polls flags. A kernel that computes on the SMs that are left is slowed by
# the bandwidth that is taken as well: all of it where memory is what limits it, FEELS of it where its own traffic only
# has to get through. NVIDIA/nccl issue 1428 has one A100's kernels beside an all_gather: a matrix product takes 1.76
# times as long, attention 1.83, elementwise kernels 2.5 times. What is left is shared evenly by the streams whose
# kernels compute (the hardware's rule is not published: kernels that fill the device take turns, small ones could run
# beside each other and are here given their share only).
#
# Nothing is done until somebody looks. Between two moments that others can see (a communication kernel's turn, a mark
# that is waited for) the device is a small calculation of its own, and the simulation's clock has no event.

LEAST_SHARE = 0.05
"""What is left to compute, however many communication kernels run: they never take the last SM."""

FEELS = 0.6
"""How much a kernel that computes feels of the memory bandwidth that communication takes: with 24 channels on 108 SMs
and 300 GB/s moved three times this gives 1.74 for NVIDIA/nccl issue 1428's product and attention, measured at 1.76 and
1.83, and 2.3 for its elementwise kernels, measured at 2.5."""


MOST_FORESEEN = 64
"""Items in streams up to which `foresee` looks ahead: weights moved one by one have two, a training step hundreds."""

MOST_DONE = 100_000
"""The last kernels of a device, which it remembers: a step of ten layers with 64 micro-batches has 80,000."""


def _over(_: Comm) -> None:
    raise AssertionError("a communication kernel begins once")


class StreamTimeline:
    """Items in their order; the first may be running."""

    __slots__ = ("items", "last_put_s", "left_s", "name", "number", "priority", "visible")

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = 0
        """Among its device's streams."""
        self.priority = 0
        self.last_put_s = 0.0
        """When the host last put something in."""
        self.items: deque[Item] = deque()
        self.left_s: float | None = None
        """Of the kernel that runs: what it would take alone. None: none runs."""
        self.visible = 0
        """Items among them whose moment others can see."""


class Timeline:
    """The streams of one device. *env* is the simulation's clock."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._streams: list[StreamTimeline] = []
        self._at_s = 0.0
        self._comms: list[Comm] = []
        self._compute_left = self._memory_left = 1.0
        self._planned_s = NEVER
        self._inside = False
        self._closed = False
        self.before_put: Callable[[], None] | None = None
        """Puts what somebody holds back, first (fusion.py)."""
        self.done: deque[tuple[int, Kernel | Comm]] = deque(maxlen=MOST_DONE)
        """The last ones, with the number of their streams."""
        self.account = Account()

    # -- the host's side

    def stream(self, name: str) -> StreamTimeline:
        result = StreamTimeline(name)
        self._streams.append(result)
        return result

    def put(self, stream: StreamTimeline, item: Item) -> None:
        """*item* at the end of *stream*."""
        if self.before_put is not None:
            self.before_put()
        begins = not stream.items
        stream.items.append(item)
        stream.last_put_s = item.launched_s
        if type(item) is Comm:
            stream.visible += 1
            self._plan()
        elif begins and self._planned_s < NEVER:
            self._plan()  # it will share the device with what runs

    def mark(self, stream: StreamTimeline, now_s: float) -> Mark:
        """The point up to which *stream* has been filled."""
        result = Mark(now_s)
        self.put(stream, result)
        return result

    def reached(self, mark: Mark) -> bool:
        """Whether *mark* has been reached by now."""
        if mark.reached_s is None:
            self._plan()
        return mark.reached_s is not None

    def foresee(self, mark: Mark) -> float | None:
        """Return when *mark* is reached if only the few kernels before it matter; the device is then ahead of the
        simulation's clock. None if others take part."""
        self._plan()
        items = [item for stream in self._streams for item in stream.items]
        plain = all(type(item) is Kernel or (type(item) is Mark and not item.waiters) for item in items)
        if self._inside or self._comms or len(items) > MOST_FORESEEN or not plain:
            return None
        while mark.reached_s is None:
            self._advance(self._next_s(self._running()))
        return mark.reached_s

    def when_reached(self, mark: Mark, tell: Callable[[], None]) -> None:
        """Call *tell* once, at the moment at which *mark* is reached; at once if it has been."""
        if self.reached(mark):
            tell()
            return
        if not mark.waiters:
            for stream in self._streams:
                if mark in stream.items:
                    stream.visible += 1
        mark.waiters.append(tell)
        self._plan()

    def meet(self, comm: Comm) -> None:
        """The peers of *comm* have come: it moves bytes from now on."""
        if not comm.waits:
            return
        self._advance(float(self._env.now))
        comm.waits = False
        self._share()
        self._plan()

    def end(self, comm: Comm) -> None:
        """The network has moved the last byte of *comm*."""
        self._advance(float(self._env.now))
        comm.ended_s = self._at_s
        self._comms.remove(comm)
        comm.begin = _over  # it holds the call's tensors, and `done` holds the kernel
        assert comm.begun_s is not None
        self.account.communicated(comm.records, comm.begun_s, self._at_s, comm.exposed_s)
        self._share()
        self._plan()

    def catch_up(self) -> None:
        """Let the device do its work up to now, so that its items are up to date."""
        self._plan()

    @property
    def communicates(self) -> bool:
        """Whether a communication kernel runs or will."""
        return bool(self._comms) or any(stream.visible for stream in self._streams)

    @property
    def remembers_from_s(self) -> float:
        """Return the time from which `done` holds everything that it ran."""
        if len(self.done) < MOST_DONE:
            return float("-inf")
        item = self.done[0][1]
        found_s = item.ended_s if isinstance(item, Kernel) else item.begun_s
        return found_s or 0.0

    def close(self) -> None:
        """The simulation is over: the device does what is left, except for communication, and nobody looks on."""
        if self.before_put is not None:
            self.before_put()
        self._closed = True
        while (next_s := self._next_s(self._running())) < NEVER:
            self._advance(next_s)

    # -- the device's side

    def _plan(self) -> None:
        """Come up to now, and come again when something happens, as long as somebody is to see something."""
        if self._inside:
            return
        now_s = float(self._env.now)
        self._advance(now_s)
        next_s = NEVER
        if any(stream.visible for stream in self._streams):
            next_s = self._next_s(self._running())
        if next_s != self._planned_s:
            self._planned_s = next_s
            if next_s < NEVER:
                later = self._env.timeout(max(0.0, next_s - now_s))
                assert later.callbacks is not None
                later.callbacks.append(lambda _: self._come(next_s))

    def _come(self, planned_s: float) -> None:
        if planned_s == self._planned_s:  # else something came between, and planned anew
            self._planned_s = NEVER
            self._advance(planned_s)  # the clock's sum may be a rounding short of it
            self._plan()

    def _share(self) -> None:
        self._compute_left = max(LEAST_SHARE, 1.0 - sum(comm.load.multiprocessors for comm in self._comms))
        self._memory_left = max(
            LEAST_SHARE, 1.0 - sum(comm.load.memory_bandwidth for comm in self._comms if not comm.waits)
        )

    def _rate(self, kernel: Kernel, computing: int) -> float:
        if not self._comms:
            return 1.0 / computing
        taken = 1.0 - self._memory_left
        left = self._compute_left * (1.0 - (taken if kernel.memory_bound else FEELS * taken))
        return max(LEAST_SHARE, left) / computing

    def _running(self) -> list[tuple[StreamTimeline, Kernel]]:
        return [(s, s.items[0]) for s in self._streams if s.left_s is not None]  # type: ignore[misc]

    def _advance(self, to_s: float) -> None:
        """Let the device run up to *to_s*."""
        if self._inside:
            return
        self._inside = True
        try:
            while True:
                self._settle()
                running = self._running()
                next_s = self._next_s(running)
                if next_s > to_s:
                    self._run(running, to_s)
                    return
                self._run(running, next_s)
                for stream, kernel in running:
                    if stream.left_s is not None and stream.left_s <= 0.0:
                        self._finish(stream, kernel)
        finally:
            self._inside = False

    def _next_s(self, running: list[tuple[StreamTimeline, Kernel]]) -> float:
        """Return when the next kernel begins or ends."""
        result, at_s = NEVER, self._at_s
        many = len(running)
        for stream, kernel in running:
            assert stream.left_s is not None
            end_s = at_s + stream.left_s / self._rate(kernel, many)
            if end_s < result:
                result = end_s
        for stream in self._streams:
            if stream.left_s is None and stream.items:
                launched_s = stream.items[0].launched_s
                if at_s < launched_s < result:
                    result = launched_s
        return result

    def _run(self, running: list[tuple[StreamTimeline, Kernel]], to_s: float) -> None:
        """Let the running items run up to *to_s*, before which none of them ends."""
        passed_s = to_s - self._at_s
        if passed_s > 0.0:
            many = len(running)
            if running:
                self.account.compute_s += passed_s
                if self._comms:
                    used = sum(self._rate(kernel, many) for _, kernel in running)
                    self.account.overlapped(passed_s, used)
            elif self._comms:
                comm = self._comms[0]
                comm.exposed_s += self.account.waited(comm.records, self._at_s, to_s)
            else:
                self.account.host_s += passed_s
            least_s = 1e-15 + 2.0 * math.ulp(to_s)
            for stream, kernel in running:
                assert stream.left_s is not None
                rate = self._rate(kernel, many)
                left_s = stream.left_s - passed_s * rate
                # What rounding leaves of a kernel that ends just now would be an event of its own, and no time at all.
                stream.left_s = left_s if left_s > least_s + 1e-12 * kernel.seconds else 0.0
            self._at_s = to_s

    def _finish(self, stream: StreamTimeline, kernel: Kernel) -> None:
        stream.items.popleft()
        stream.left_s = None
        kernel.ended_s = self._at_s
        assert kernel.begun_s is not None
        self.done.append((stream.number, kernel))
        self.account.ran(kernel.name, self._at_s - kernel.begun_s)
        if kernel.on_end is not None:
            kernel.on_end(kernel)

    def _settle(self) -> None:
        """All that takes no time and whose turn has come."""
        again = True
        while again:
            again = False
            for stream in self._streams:
                items = stream.items
                while items and stream.left_s is None:
                    item = items[0]
                    if item.launched_s > self._at_s:
                        break
                    if type(item) is Kernel:  # nobody waits for its begin
                        item.begun_s = self._at_s
                        stream.left_s = item.seconds
                        if item.seconds <= 0.0:
                            self._finish(stream, item)
                    elif type(item) is StreamWait:
                        if item.mark.reached_s is None:
                            break
                        items.popleft()
                    elif self._turn(stream, item):
                        again = True
                    else:
                        break

    def _turn(self, stream: StreamTimeline, item: Any) -> bool:
        """Whether *item*, a mark or a communication kernel, the first of *stream*, has gone or begun."""
        if type(item) is Mark:
            stream.items.popleft()
            item.reached_s = self._at_s
            if item.on_reach is not None:
                item.on_reach(item)
            if item.waiters:
                stream.visible -= 1
                for tell in item.waiters:
                    tell()
                item.waiters.clear()
            return True
        assert type(item) is Comm
        if item.ended_s is not None:
            stream.items.popleft()
            return True
        if item.begun_s is None and not self._closed:
            item.begun_s = self._at_s
            self.done.append((stream.number, item))
            stream.visible -= 1
            self._comms.append(item)
            self._share()
            item.begin(item)
            return True
        return False
