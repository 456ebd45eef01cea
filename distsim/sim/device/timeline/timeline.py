"""One accelerator's streams in virtual time: what runs when, and how what runs at once slows each other.

A stream runs its items one after another, as CUDA's do: kernels, marks, waits for marks of other streams, and
communication kernels, which begin when their turn comes and end when the network says so. The host only puts items
at the end; it waits for a mark where a program synchronizes.

At once: a communication kernel holds SMs from its turn on, also while it waits for its peers, and memory bandwidth as
soon as they have come: until then it polls flags. A
kernel that computes on the SMs that are left is slowed by the bandwidth that is taken as well: all of it where memory
is what limits it, FEELS of it where its own traffic only has to get through. NVIDIA/nccl issue 1428 has one A100's
kernels beside an all_gather: a matrix product takes 1.76 times as long, attention 1.83, elementwise kernels 2.5 times.
What is left is shared evenly by the streams whose kernels compute (the hardware's rule is not published: kernels that
fill the device take turns, small ones could run beside each other and are here given their share only).

Nothing is done until somebody looks. Between two moments that others can see (a communication kernel's turn, a mark
that is waited for) the device is a small calculation of its own, and the simulation's clock has no event.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import simpy

from distsim.sim.device.timeline.account import Account
from distsim.sim.device.timeline.items import NEVER, Comm, Item, Kernel, Mark, Wait

__all__ = ["Stream", "Timeline"]

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


class Stream:
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
        self._streams: list[Stream] = []
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

    def stream(self, name: str) -> Stream:
        made = Stream(name)
        self._streams.append(made)
        return made

    def put(self, stream: Stream, item: Item) -> None:
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

    def mark(self, stream: Stream, now_s: float) -> Mark:
        """The point up to which *stream* has been filled."""
        made = Mark(now_s)
        self.put(stream, made)
        return made

    def reached(self, mark: Mark) -> bool:
        """Whether *mark* has been reached by now."""
        if mark.reached_s is None:
            self._plan()
        return mark.reached_s is not None

    def foresee(self, mark: Mark) -> float | None:
        """When *mark* is reached, where nothing but the few kernels before it can change that; the device is then
        ahead of the simulation's clock. None: somebody else has a part in it."""
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
        """Let the device do what it has done by now: what its items say of themselves is true then."""
        self._plan()

    @property
    def communicates(self) -> bool:
        """Whether a communication kernel runs or will."""
        return bool(self._comms) or any(stream.visible for stream in self._streams)

    @property
    def remembers_from_s(self) -> float:
        """What it has run since then is in `done`."""
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

    def _running(self) -> list[tuple[Stream, Kernel]]:
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

    def _next_s(self, running: list[tuple[Stream, Kernel]]) -> float:
        """When the next kernel begins or ends, as things are."""
        found, at_s = NEVER, self._at_s
        many = len(running)
        for stream, kernel in running:
            assert stream.left_s is not None
            end_s = at_s + stream.left_s / self._rate(kernel, many)
            if end_s < found:
                found = end_s
        for stream in self._streams:
            if stream.left_s is None and stream.items:
                launched_s = stream.items[0].launched_s
                if at_s < launched_s < found:
                    found = launched_s
        return found

    def _run(self, running: list[tuple[Stream, Kernel]], to_s: float) -> None:
        """Let what runs run up to *to_s*, where none of it is over before."""
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

    def _finish(self, stream: Stream, kernel: Kernel) -> None:
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
                    elif type(item) is Wait:
                        if item.mark.reached_s is None:
                            break
                        items.popleft()
                    elif self._turn(stream, item):
                        again = True
                    else:
                        break

    def _turn(self, stream: Stream, item: Any) -> bool:
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
