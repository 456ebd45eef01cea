"""Streams of one device in virtual time: items, their order, and an account of the device's seconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from distsim.sim.device.timeline.account import Account

# -- What a stream holds: kernels, marks, waits for marks, and communication kernels.

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Load:
    """Share of the device that a communication kernel takes from the kernels that run at the same time."""

    multiprocessors: float = 0.0
    memory_bandwidth: float = 0.0
    of_collective: bool = False
    """Whether the kernel carries out a collective, and not messages, which take few multiprocessors."""


@dataclass(slots=True, eq=False)
class Kernel:
    """A kernel that takes *seconds* on an idle device and cannot start before the host has launched it."""

    seconds: float
    launched_s: float
    memory_bound: bool = False
    name: Any = ""
    begun_s: float | None = None
    ended_s: float | None = None
    on_end: Callable[[Kernel], None] | None = None
    kind: str = ""
    """Kind of the operator, as in `Cost.kind`."""


@dataclass(slots=True, eq=False)
class Mark:
    """A point in a stream: a torch.cuda.Event, or the end of the items launched so far."""

    launched_s: float
    reached_s: float | None = None
    waiters: list[Callable[[], None]] = field(default_factory=list)
    on_reach: Callable[[Mark], None] | None = None
    """Called for accounting when the mark is seen to be reached, which may be later than the moment itself."""


@dataclass(slots=True, eq=False)
class StreamWait:
    """Item that makes a stream wait until *mark* of another stream has been reached."""

    mark: Mark
    launched_s: float


@dataclass(slots=True, eq=False)
class Comm:
    """A communication kernel. *begin* is called when its turn comes, and `Timeline.end` when the network has
    finished.
    """

    launched_s: float
    load: Load
    begin: Callable[[Comm], None]
    record: Any = None
    """Call that the kernel carries out."""
    records: Sequence[Any] = ()
    """All calls that the kernel carries out; a batch has several."""
    expires_s: float = NEVER
    """Virtual time at which the program's timeout for the call expires."""
    waits: bool = False
    """Whether its peers have not arrived. The kernel then holds its SMs and uses no memory bandwidth."""
    explicit: bool = False
    """Whether the program set that timeout itself."""
    revoke: Callable[[], None] | None = None
    """Called when it expires, instead of the end of the process."""
    behind: Mark | None = None
    """Mark in its stream at the end of the kernel."""
    exposed_s: float = 0.0
    """Seconds in which its bytes moved while no kernel computed."""
    begun_s: float | None = None
    ended_s: float | None = None


Item = Kernel | Mark | StreamWait | Comm


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
# A persistent product has as many blocks as the device has SMs, each for its part of the tiles. Those that find no SM
# begin when the others have ended, and take as long again, however few they are. pytorch/pytorch issue 143988 has the
# products of a training with FSDP on H100 beside NCCL on a tenth of the SMs: they take twice as long. NVIDIA's forum
# (topic 337991) has one beside an all_gather of 24 blocks: 1.7 times. Nothing is published of products beside messages
# of a pipeline, which take two to four SMs. Kernels of libraries before Hopper have a block for each tile, so they lose
# what is taken.
#
# Nothing is done until somebody looks. Between two moments that others can see (a communication kernel's turn, a mark
# that is waited for) the device is a small calculation of its own, and the simulation's clock has no event.

LEAST_SHARE = 0.05
"""Smallest share of the SMs that remains for computation; communication kernels never take all SMs."""

FEELS = 0.6
"""Fraction of the memory bandwidth taken by communication that slows computing kernels down.

With 24 channels on 108 SMs and 300 GB/s moved three times this gives 1.74 for NVIDIA/nccl issue 1428's product and
attention, measured at 1.76 and 1.83, and 2.3 for its elementwise kernels, measured at 2.5.
"""


MOST_FORESEEN = 64
"""Largest number of queued items for which `foresee` looks ahead. Weights that are copied one by one have two, a
training step hundreds.
"""

MOST_DONE = 100_000
"""Number of finished kernels that a device remembers. A step of ten layers with 64 micro-batches has 80,000."""


PEER = "peer"
"""Kind of a copy of a peer's memory over NVLink, by a copy engine: it takes no SM from kernels that compute."""
HOST_COPIES = ("h2d", "d2h")
"""Kinds of copies over PCIe. A GPU has one copy engine for each direction, whose copies share the link's bandwidth in
that direction; kernels that compute are not slowed by them (CUDA C++ Programming Guide, "Overlapping Behavior", with
asyncEngineCount = 2)."""


def _beside(running: list[tuple[StreamTimeline, Kernel]]) -> dict[str, int]:
    """Return the number of running kernels on the SMs, as "", and on each copy engine, by kind."""
    result = {"": 0}
    for _, kernel in running:
        kind = kernel.kind
        if kind in HOST_COPIES:
            result[kind] = result.get(kind, 0) + 1
        elif kind != PEER:
            result[""] += 1
    return result


def _over(_: Comm) -> None:
    raise AssertionError("a communication kernel begins once")


class StreamTimeline:
    """Queued items of a stream, in order. The first may be running."""

    __slots__ = ("items", "last_put_s", "left_s", "name", "number", "priority", "visible")

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = 0
        """Index among the device's streams."""
        self.priority = 0
        self.last_put_s = 0.0
        """Virtual time at which the host last launched something on the stream."""
        self.items: deque[Item] = deque()
        self.left_s: float | None = None
        """Seconds that the running kernel still needs on an idle device; None if no kernel runs."""
        self.visible = 0
        """Number of queued items whose time is visible outside the device."""


class Timeline:
    """The streams of one device. *env* is the simulation's clock.

    With *one_connection* (CUDA_DEVICE_MAX_CONNECTIONS=1) the device takes the work of all streams from one queue:
    kernels and waits for marks begin in the order in which the host launched them. With *persistent_products* matrix
    products have as many blocks as the device has SMs.
    """

    def __init__(self, env: simpy.Environment, one_connection: bool = False, persistent_products: bool = False) -> None:
        self._env = env
        self._persistent_products = persistent_products
        self._streams: list[StreamTimeline] = []
        self._queue: deque[Item] | None = deque() if one_connection else None
        """Work that has not begun, of all streams that share a connection."""
        self._at_s = 0.0
        self._comms: list[Comm] = []
        self._compute_left = self._memory_left = 1.0
        self._waves = 1
        """Number of rounds in which the blocks of a persistent product find a multiprocessor."""
        self._planned_s = NEVER
        self._inside = False
        self._closed = False
        self.before_put: Callable[[], None] | None = None
        """Called before an item is launched, to launch kernels that were held back for fusion (fusion.py)."""
        self.done: deque[tuple[int, Kernel | Comm]] = deque(maxlen=MOST_DONE)
        """Last finished kernels, with the index of their stream."""
        self.account = Account()

    # -- the host's side

    def stream(self, name: str) -> StreamTimeline:
        result = StreamTimeline(name)
        self._streams.append(result)
        return result

    def put(self, stream: StreamTimeline, item: Item) -> None:
        """Append *item* to *stream*."""
        if self.before_put is not None:
            self.before_put()
        begins = not stream.items
        stream.items.append(item)
        if self._queue is not None and type(item) is not Mark:
            self._queue.append(item)
        stream.last_put_s = item.launched_s
        if type(item) is Comm:
            stream.visible += 1
            self._plan()
        elif begins and self._planned_s < NEVER:
            self._plan()  # it will share the device with what runs

    def mark(self, stream: StreamTimeline, now_s: float) -> Mark:
        """Return a mark at the current end of *stream*."""
        result = Mark(now_s)
        self.put(stream, result)
        return result

    def holds(self, mark: Mark) -> bool:
        """Return whether a stream of this device is still to reach *mark*."""
        return any(mark in stream.items for stream in self._streams)

    def reached(self, mark: Mark) -> bool:
        """Return whether *mark* has been reached by now."""
        if mark.reached_s is None:
            self._plan()
        return mark.reached_s is not None

    def foresee(self, mark: Mark) -> float | None:
        """Return the time at which *mark* will be reached, if that depends only on the few kernels before it.

        The device is then ahead of the simulation's clock. Return None if other devices or ranks have an influence.
        """
        self._plan()
        items = [item for stream in self._streams for item in stream.items]
        plain = all(type(item) is Kernel or (type(item) is Mark and not item.waiters) for item in items)
        if self._inside or self._comms or len(items) > MOST_FORESEEN or not plain:
            return None
        while mark.reached_s is None:
            self._advance(self._next_s(self._running()))
        return mark.reached_s

    def when_reached(self, mark: Mark, tell: Callable[[], None]) -> None:
        """Call *tell* once when *mark* is reached, or immediately if it has been."""
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
        """Note that the peers of *comm* have arrived, so that its bytes move from now on."""
        if not comm.waits:
            return
        self._advance(float(self._env.now))
        comm.waits = False
        self._share()
        self._plan()

    def end(self, comm: Comm) -> None:
        """End the kernel *comm*: the network has moved its last byte."""
        self._advance(float(self._env.now))
        comm.ended_s = self._at_s
        self._comms.remove(comm)
        comm.begin = _over  # it holds the call's tensors, and `done` holds the kernel
        assert comm.begun_s is not None
        self.account.communicated(comm.records, comm.begun_s, self._at_s, comm.exposed_s)
        self._share()
        self._plan()

    def catch_up(self) -> None:
        """Advance the device to the current time."""
        self._plan()

    @property
    def communicates(self) -> bool:
        """Return whether a communication kernel runs or is queued."""
        return bool(self._comms) or any(stream.visible for stream in self._streams)

    @property
    def remembers_from_s(self) -> float:
        """Return the time since which `done` holds every kernel."""
        if len(self.done) < MOST_DONE:
            return float("-inf")
        item = self.done[0][1]
        found_s = item.ended_s if isinstance(item, Kernel) else item.begun_s
        return found_s or 0.0

    def close(self) -> float:
        """Finish all queued kernels except communication at the end of the simulation, without events.

        Returns:
            Time in seconds at which the last one has finished.
        """
        if self.before_put is not None:
            self.before_put()
        self._closed = True
        while (next_s := self._next_s(self._running())) < NEVER:
            self._advance(next_s)
        return self._at_s

    # -- the device's side

    def _plan(self) -> None:
        """Advance to the current time, and schedule the next change if something outside the device waits for it."""
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
        taken = sum(comm.load.multiprocessors for comm in self._comms if comm.load.of_collective)
        self._waves = math.ceil(1.0 / max(LEAST_SHARE, 1.0 - taken))
        self._memory_left = max(
            LEAST_SHARE, 1.0 - sum(comm.load.memory_bandwidth for comm in self._comms if not comm.waits)
        )

    def _rate(self, kernel: Kernel, beside: dict[str, int]) -> float:
        if kernel.kind == PEER:
            return 1.0
        if kernel.kind in HOST_COPIES:
            return 1.0 / beside[kernel.kind]
        computing = beside[""]
        if not self._comms:
            return 1.0 / computing
        taken = 1.0 - self._memory_left
        left = self._compute_left * (1.0 - (taken if kernel.memory_bound else FEELS * taken))
        if self._persistent_products and kernel.kind == "gemm" and not kernel.memory_bound:
            left = min(left, 1.0 / self._waves)
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
        beside = _beside(running)
        for stream, kernel in running:
            assert stream.left_s is not None
            end_s = at_s + stream.left_s / self._rate(kernel, beside)
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
            beside = _beside(running)
            if running:
                self.account.compute_s += passed_s
                if self._comms:
                    used = min(1.0, sum(self._rate(kernel, beside) for _, kernel in running))
                    self.account.overlapped(passed_s, used)
            elif self._comms:
                comm = self._comms[0]
                comm.exposed_s += self.account.waited(comm.records, self._at_s, to_s)
            else:
                self.account.host_s += passed_s
            least_s = 1e-15 + 2.0 * math.ulp(to_s)
            for stream, kernel in running:
                assert stream.left_s is not None
                rate = self._rate(kernel, beside)
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
        self.account.ran(kernel.name, kernel.kind, self._at_s - kernel.begun_s)
        if kernel.on_end is not None:
            kernel.on_end(kernel)

    def _settle(self) -> None:
        """Process all items at the heads of streams that take no time."""
        again = True
        while again:
            again = False
            for stream in self._streams:
                items = stream.items
                while items and stream.left_s is None:
                    item = items[0]
                    if item.launched_s > self._at_s or self._is_behind(item):
                        break
                    if type(item) is Kernel:  # nobody waits for its begin
                        item.begun_s = self._at_s
                        again = self._begun() or again
                        stream.left_s = item.seconds
                        if item.seconds <= 0.0:
                            self._finish(stream, item)
                    elif type(item) is StreamWait:
                        if item.mark.reached_s is None:
                            break
                        items.popleft()
                        again = self._begun() or again
                    elif self._turn(stream, item):
                        again = True
                    else:
                        break

    def _is_behind(self, item: Item) -> bool:
        """Return whether *item* is still behind other work in the only connection to the device."""
        queue = self._queue
        if not queue or queue[0] is item or isinstance(item, Mark):
            return False
        return isinstance(item, StreamWait) or item.begun_s is None

    def _begun(self) -> bool:
        """Take the first work from the only connection; return whether there is one, so that others may begin."""
        if self._queue is None:
            return False
        self._queue.popleft()
        return True

    def _turn(self, stream: StreamTimeline, item: Any) -> bool:
        """Process *item*, a mark or communication kernel at the head of *stream*; return whether it was passed or
        started.
        """
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
            self._begun()
            self.done.append((stream.number, item))
            stream.visible -= 1
            self._comms.append(item)
            self._share()
            item.begin(item)
            return True
        return False
