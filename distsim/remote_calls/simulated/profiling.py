"""torch's legacy profiler over RPC: the caller's profile shows what a callee ran."""

from __future__ import annotations

import itertools
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from distsim.remote_calls.simulated.transport import Failed, RpcMessage
from distsim.sim.isolation.for_ranks import name_for_ranks
from distsim.sim.isolation.process import RankTask, require_task
from distsim.torch_compat.groups import DISABLE_PROFILER_LEGACY, ENABLE_PROFILER_LEGACY

_clock_s = time.perf_counter
_real_enable: Any = ENABLE_PROFILER_LEGACY.get()
_real_disable: Any = DISABLE_PROFILER_LEGACY.get()
_here = threading.local()
"""Per thread: `profile`, and `key`, the name under which its next call is shown."""
_handles = itertools.count(1 << 40)

REMOTE = "#remote_op: "
"""Separator between the name of a call and that of an operator it ran (torch/csrc/distributed/rpc/profiler)."""


@dataclass(frozen=True, slots=True)
class Event:
    """One of C++'s events, or one like them, as torch's parser asks for it."""

    label: str
    at_s: float
    node: int
    of_cpp: Any = None
    remote: bool = False
    what: str = ""
    number: int = 0

    def name(self) -> str:
        return self.label

    def node_id(self) -> int:
        return self.node

    def is_remote(self) -> bool:
        return self.remote

    def kind(self) -> str:
        return self.what or str(self.of_cpp.kind())

    def handle(self) -> int:
        return self.number or int(self.of_cpp.handle())

    def is_async(self) -> bool:
        """Return whether a call is: it ends in another thread."""
        return self.of_cpp is None or bool(self.of_cpp.is_async())

    def cpu_elapsed_us(self, other: Event) -> float:
        return (other.at_s - self.at_s) * 1e6

    def __getattr__(self, name: str) -> Any:
        if self.of_cpp is not None:
            return getattr(self.of_cpp, name)
        answer = _OF_A_CALL[name]
        return lambda: answer


_OF_A_CALL: dict[str, Any] = {
    "thread_id": 0,
    "fwd_thread_id": 0,
    "shapes": [],
    "stack": [],
    "scope": 7,
    "sequence_nr": -1,
    "flops": 0,
    "has_cuda": False,
    "device": -1,
    "cpu_memory_usage": 0,
    "cuda_memory_usage": 0,
}


@dataclass(slots=True)
class ProfiledCall:
    """A call that a profiled thread has made."""

    key: str
    profile: Profile
    begun_s: float


@dataclass(slots=True)
class Profile:
    """Profile of one thread and of its remote calls."""

    config: Any
    task: RankTask
    worker: int
    begun_s: float = field(default_factory=lambda: _clock_s())
    marks: list[tuple[float, float]] = field(default_factory=list)
    """The host's seconds since it began, virtual seconds; in order."""
    events: list[list[Event]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    over: bool = False

    def mark(self) -> None:
        """Record that both clocks are known."""
        self.marks.append((_clock_s() - self.begun_s, self.task.now_s()))

    def ended(self, call: ProfiledCall, ran: Sequence[Sequence[Event]]) -> None:
        """Record a finished call and the events that its callee *ran*."""
        number = next(_handles)
        begun = Event(call.key, call.begun_s, self.worker, what="push", number=number)
        ended = Event(call.key, require_task().now_s(), self.worker, what="pop", number=number)
        self.events.append([begun, ended])
        for events in ran:
            self.events.append(
                [
                    Event(call.key + REMOTE + e.label, e.at_s, e.node, e.of_cpp, True, e.what, e.number)
                    for e in events
                    if e.label != _START
                ]
            )

    def take(self, records: Sequence[Sequence[Any]]) -> None:
        """Finish the profile: C++ records the thread, this module its calls."""
        start = next(one for thread in records for one in thread if one.name() == _START)
        threads = []
        for thread in records:
            ours = _ours(thread, self.keys)
            own = [one for one in thread if one.kind() not in ("push", "pop") or one.handle() not in ours]
            threads.append(
                [Event(one.name(), self._virtual(start.cpu_elapsed_us(one) / 1e6), self.worker, one) for one in own]
            )
        self.events[:0] = threads  # what a call is in comes before it

    def _virtual(self, host_s: float) -> float:
        after = bisect_right(self.marks, (host_s, float("inf")))
        (host_0, at_0), (host_1, at_1) = self.marks[max(after - 1, 0)], self.marks[min(after, len(self.marks) - 1)]
        if host_1 <= host_0:
            return at_0
        return at_0 + (at_1 - at_0) * (host_s - host_0) / (host_1 - host_0)


_START = "__start_profile"
_MODE = "PythonDispatchMode"


def _ours(records: Sequence[Any], keys: set[str]) -> set[int]:
    """Return handles of events that exist only because this is a simulation.

    These are calls that are shown differently, dispatch modes, and the operators that these modes run again.
    """
    result: set[int] = set()
    open_now: list[Any] = []
    for one in records:
        if one.kind() == "push":
            name = one.name()
            again = len(open_now) > 1 and open_now[-1].name() == _MODE and open_now[-2].name() == name
            if name == _MODE or name in keys or again:
                result.add(one.handle())
            open_now.append(one)
        elif one.kind() == "pop":
            open_now = [other for other in open_now if other.handle() != one.handle()]
    return result


def _begin(config: Any) -> Profile:
    task = require_task()
    state = task.process.rpc
    agent = None if state is None else state.agent
    profile = _here.profile = Profile(config, task, -1 if agent is None else agent.id)
    sleeps: Any = task._hand_over

    def hand_over(request: Any) -> None:
        profile.mark()
        sleeps(request)
        profile.mark()

    def sleep(seconds: float) -> None:
        profile.mark()  # before it is as if it had slept
        type(task).sleep(task, seconds)

    profile.mark()
    task._hand_over, task.sleep = hand_over, sleep  # type: ignore[method-assign]
    _here.sleeps = sleeps
    _real_enable(config)
    return profile


def _end(*args: Any) -> Profile:
    profile: Profile = _here.profile
    records = _real_disable(*args)
    profile.mark()
    _here.profile = None
    profile.task._hand_over = _here.sleeps  # type: ignore[method-assign]
    del profile.task.sleep  # the method shows again
    profile.take(records)
    return profile


# -- the caller


class ProfilerKeys:
    """Replacement for C++'s RemoteProfilerManager."""

    @staticmethod
    def set_current_profiling_key(key: str) -> None:
        """Set the name under which the next call of this thread is shown."""
        _here.key = key


def begin_call(message: RpcMessage) -> ProfiledCall | None:
    """Return the profile of a call whose *message* is about to be sent; None if this thread is not profiled."""
    key: str | None = getattr(_here, "key", None)
    profile: Profile | None = getattr(_here, "profile", None)
    if key is None or profile is None:
        return None
    _here.key = None
    profile.keys.add(key)
    profile.mark()
    message.profile = profile.config
    return ProfiledCall(key, profile, profile.task.now_s())


def reply_came(call: ProfiledCall | None, reply: RpcMessage | Failed) -> None:
    """Note that the reply was read."""
    if call is not None and not call.profile.over:
        call.profile.ended(call, () if isinstance(reply, Failed) else reply.events)


# -- the callee


@contextmanager
def profiled(message: RpcMessage) -> Iterator[None]:
    """Return a context in which the request *message* runs in this thread."""
    if message.profile is None:
        yield
        return
    message.profile = _begin(message.profile)
    try:
        yield
    finally:
        _end()


def with_events(message: RpcMessage, reply: RpcMessage | Failed) -> None:
    """Add the recorded events to *reply*."""
    if isinstance(message.profile, Profile) and isinstance(reply, RpcMessage):
        message.profile.over = True
        reply.events = message.profile.events


# -- the program


def _disable(_: RankTask, *args: Any) -> Any:
    if getattr(_here, "profile", None) is None:
        return _real_disable(*args)
    profile = _end(*args)
    profile.over = True
    return profile.events


def profiling_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for the time of a simulation."""
    return [
        *name_for_ranks(ENABLE_PROFILER_LEGACY, lambda _, config: _begin(config)),
        *name_for_ranks(DISABLE_PROFILER_LEGACY, _disable),
    ]
