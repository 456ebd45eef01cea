"""Threads and locks of a rank: cooperative, so that a waiting thread gives the baton away."""

from __future__ import annotations

import _thread
import concurrent.futures.thread as pool_threads
import contextlib
import contextvars
import itertools
import os
import queue
import selectors
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent import futures
from typing import Any

import torch

from distsim.debug.evidence.watched_source import ended_thread
from distsim.debug.records import HostWait
from distsim.sim.c10d.backend import adopt_groups
from distsim.sim.device.cpu import CpuRates
from distsim.sim.device.dispatch import ComputeMode
from distsim.sim.isolation.for_ranks import for_ranks, patch_for_ranks
from distsim.sim.isolation.process import RankTask, SimProcess, current_task, not_ordered, require_task
from distsim.sim.kernel.clocks import START, Clock, joined
from distsim.sim.kernel.scheduler import Event, Unwind
from distsim.sim.kernel.steps import Access, Objects
from distsim.sim.kernel.turns import TurnQueue, TurnRequest, always, locking_line, meet_clock, name_of
from distsim.torch_compat.device import SET_ONLY_LIFT_CPU_TENSORS
from distsim.torch_compat.groups import SET_MULTITHREADING_ENABLED, UNREGISTER_ALL_PROCESS_GROUPS

_set_only_lift_cpu_tensors = SET_ONLY_LIFT_CPU_TENSORS.get()
_unregister_all_process_groups = UNREGISTER_ALL_PROCESS_GROUPS.get()
_set_multithreading_enabled = SET_MULTITHREADING_ENABLED.get()

_set_num_threads = torch.set_num_threads


@contextlib.contextmanager
def thread_of(process: SimProcess) -> Iterator[None]:
    """Return a context in which torch treats the calling thread as a thread of *process*.

    At its end, torch's thread-local state refers to no Python objects, which would otherwise be dropped while the
    thread ends.
    """
    task = require_task()
    _set_num_threads(1)
    _set_multithreading_enabled(False)
    adopt_groups(process)
    cpu, faults = process.port.facts.cpu, process.port.faults
    slowed = faults.compute_s if faults.are_planted else None
    if process.accelerators is not None:
        _set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes its values on the host
    try:
        rates = CpuRates(
            cpu.flops_per_s, cpu.memory_bytes_per_s, cpu.op_overhead_s, slowed, process.port.facts.keeps_slices
        )
        with ComputeMode(task, rates):
            yield
    finally:
        _unregister_all_process_groups()


# -- Threads and locks of a rank: cooperative, so that whoever waits gives the baton away.
#
# `threading`'s pure Python primitives (Condition, Event, Semaphore, Barrier, Queue) stand on its
# locks; so replacing the lock, `Thread.start`, `join` and `is_alive` is enough.

OWN_THREADS = HostWait("a lock, condition or queue of its own threads")


_IS_OWNED = threading.Condition._is_owned.__code__  # type: ignore[attr-defined]


class CoopLock:
    """`threading.Lock` inside a rank; an ordinary lock outside a simulation."""

    def __init__(self) -> None:
        self._real = _thread.allocate_lock()
        self._waiters: deque[Event] = deque()
        self._holder = ""
        task = current_task()
        turns = None if task is None else task.port.facts.turns
        self.key: Hashable = id(self)
        """Name of the lock, which is the same in all runs of an exploration."""
        if task is not None and turns is not None:
            kind = "lock" if locking_line(sys._getframe(1)) else "a library's lock"  # those of a first run may be more
            self.key = kind, name_of(task), turns.number(kind, name_of(task))
        self._released: Clock = START
        """In an exploration, what happens before its last release."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = current_task()
        if task is None:
            return self._real.acquire(blocking, timeout)
        if task.port.facts.turns is not None:
            limit_s = timeout if blocking and timeout >= 0 else None
            if not self._take_turn(task.port.facts.turns, task, blocking, limit_s):
                return False
        if self._real.acquire(False):
            self._holder = task.name
            return True
        if not blocking:
            return False
        if timeout < 0 and timeout != -1:
            raise ValueError("timeout value must be a non-negative number")
        give_up_s = None if timeout < 0 else task.now_s() + timeout
        while True:
            event = task.port.event()
            self._waiters.append(event)
            left = None if give_up_s is None else max(0.0, give_up_s - task.now_s())
            in_time = False
            try:
                task.held_by = self._holder if give_up_s is None else ""  # with a time limit nobody need release it
                in_time = task.wait_until(event, OWN_THREADS, left)
            finally:
                if not in_time and event in self._waiters:
                    self._waiters.remove(event)
            if not in_time:
                return False
            if self._real.acquire(False):
                self._holder = task.name
                return True

    def _take_turn(self, turns: TurnQueue, task: RankTask, blocks: bool, limit_s: float | None) -> bool:
        """In an exploration, wait until the lock is free and it is this thread's turn, unless torch takes it.

        Return False if the wait has reached its limit.
        """
        if task.within_turn:
            return True
        frame = sys._getframe(2)
        caller = locking_line(frame)
        if caller is None or frame.f_code is _IS_OWNED:  # a condition only asks whether it holds its lock
            meet_clock(task, self._released)
        elif not blocks:
            turns.does("tries a lock")
        else:
            if limit_s is not None and turns.orders.explores_timeouts:
                turns.does("waits for a lock, a condition or an event with a limit")
            lock = TurnRequest(
                "lock",
                caller.line,
                {self.key: Access.WRITE},
                is_possible=lambda: not self._real.locked(),
                released=lambda: self._released,
            )
            task.held_by = self._holder if limit_s is None else ""
            return turns.ask(task, lock, OWN_THREADS, limit_s, explicit=limit_s is not None) is not None
        return True

    def release(self) -> None:
        task = current_task()
        if task is not None and task.port.facts.turns is not None:
            self._released = joined(self._released, task.clock)
        self._real.release()
        while self._waiters:
            event = self._waiters.popleft()
            if not event.triggered:
                event.succeed()
                break

    def locked(self) -> bool:
        return self._real.locked()

    def _at_fork_reinit(self) -> None:
        self._real = _thread.allocate_lock()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


_real_is_set = threading.Event.is_set


def _is_set(self: threading.Event) -> bool:
    """Replace `threading.Event.is_set`: in an exploration it reads the event when it has its turn."""
    task = current_task()
    turns = None if task is None else task.port.facts.turns
    caller = None if turns is None else locking_line(sys._getframe(1))
    of_threads = sys._getframe(1).f_code.co_filename in _OF_THREADS
    lock: Any = self._cond._lock  # type: ignore[attr-defined]
    if task is not None and turns is not None and caller is not None and not of_threads and hasattr(lock, "key"):
        request = TurnRequest("is_set", caller.line, {lock.key: Access.READ}, is_look=True)
        turns.ask(task, request, OWN_THREADS, None, explicit=False)
    return _real_is_set(self)


class _SimpleQueue(queue._PySimpleQueue):  # type: ignore[name-defined]
    """`queue.SimpleQueue` in Python, so that its lock is cooperative and its operations are those of a queue."""

    maxsize = 0

    @property
    def mutex(self) -> Any:
        """Return the lock that stands for the queue."""
        return self._count._cond._lock

    def _qsize(self) -> int:
        return len(self._queue)

    def qsize(self) -> int:
        _in_one_turn(self, "queue qsize", always, frozenset)
        return self._qsize()

    def empty(self) -> bool:
        return not self.qsize()


_OF_THREADS = (threading.__file__, __file__)
"""Files that ask events of their own."""


def _in_one_turn(
    items: Any, label: str, is_possible: Callable[[], bool], enablers: Callable[[], frozenset[int]]
) -> int | None:
    """In an exploration, wait for the turn of an operation on a queue, whose locks then ask for none.

    Return the number of its step; None outside of an exploration, and for a queue of torch.
    """
    task = current_task()
    turns = None if task is None else task.port.facts.turns
    caller = None if turns is None else locking_line(sys._getframe(2))
    if task is None or turns is None or caller is None or not isinstance(items.mutex, CoopLock):
        return None
    objects: Objects = {items.mutex.key: Access.WRITE}
    request = TurnRequest(label, caller.line, objects, is_possible, enablers)
    step = turns.ask(task, request, OWN_THREADS, None, explicit=False)
    return None if step is None else step.index


def _getter(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for the method `get` of a queue: in an exploration an item is taken in one turn."""

    def get(self: Any, block: bool = True, timeout: float | None = None) -> Any:
        task = current_task()
        if timeout is not None or task is None or task.port.facts.turns is None:
            return real(self, block, timeout)
        return _get(real, self, block)

    return get


def _get(real: Callable[..., Any], self: Any, block: bool) -> Any:
    pushed: deque[int] = vars(self).setdefault("_distsim_pushed", deque())
    index = _in_one_turn(
        self,
        "queue get",
        lambda: not block or self._qsize() > 0,
        lambda: frozenset(itertools.islice(pushed, 1)) if block else frozenset(),
    )
    if index is None:
        return real(self, block)
    with _within_turn():
        item = real(self, block)
    if pushed:
        pushed.popleft()
    return item


def _putter(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for the method `put` of a queue: in an exploration an item is added in one turn."""

    def put(self: Any, item: Any, block: bool = True, timeout: float | None = None) -> None:
        index, task = None, current_task()
        if timeout is None and task is not None and task.port.facts.turns is not None:
            has_room = lambda: not block or self.maxsize <= 0 or self._qsize() < self.maxsize  # noqa: E731
            index = _in_one_turn(self, "queue put", has_room, frozenset)
        if index is None:
            real(self, item, block, timeout)
            return
        with _within_turn():
            real(self, item, block, timeout)
        vars(self).setdefault("_distsim_pushed", deque()).append(index)

    return put


for _method, _make in (("get", _getter), ("put", _putter)):
    setattr(_SimpleQueue, _method, _make(getattr(queue._PySimpleQueue, _method)))  # type: ignore[attr-defined]


@contextlib.contextmanager
def _within_turn() -> Iterator[None]:
    """Return a context in which locks ask for no turn."""
    task = require_task()
    task.within_turn = True
    try:
        yield
    finally:
        task.within_turn = False


def _allocate_lock() -> CoopLock:
    """Replace `_thread.allocate_lock`, which from Python 3.13 on is not `threading.Lock` itself."""
    return CoopLock()


_MACHINE = "/proc/"
_is_listening = False


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    """Make a thread that looks at the machine all the time (a monitor of memory) give the baton back between looks."""
    task = current_task() if event == "open" and str(args[0]).startswith(_MACHINE) else None
    if task is not None and task is not task.process.main_task and task.looks_on(_MACHINE):
        task.nap()


_real_join = threading.Thread.join
_real_is_alive = threading.Thread.is_alive


def _start(parent: RankTask, self: threading.Thread) -> None:
    if self._started.is_set():  # type: ignore[attr-defined]
        raise RuntimeError("threads can only be started once")
    global _is_listening
    if not _is_listening:  # an audit hook cannot be removed again
        sys.addaudithook(_on_event)
        _is_listening = True
    process = parent.process
    if getattr(self, "_context", process) is None:  # from Python 3.14 on a thread runs in a context
        inherits = getattr(sys.flags, "thread_inherit_context", False)
        self._context = contextvars.copy_context() if inherits else contextvars.Context()  # type: ignore[attr-defined]

    def body() -> None:
        with threading._active_limbo_lock:  # type: ignore[attr-defined]
            threading._limbo[self] = self  # type: ignore[attr-defined]  # not before: it may never begin
        with thread_of(process), _handle_of(self):
            self._bootstrap()  # type: ignore[attr-defined]

    task = parent.port.start_task(process, body, self.name, daemon=self.daemon)
    self._distsim_task = task  # type: ignore[attr-defined]
    process.threads.others.append(weakref.ref(self))


@contextlib.contextmanager
def _handle_of(thread: threading.Thread) -> Iterator[None]:
    """Give *thread* the handle that its own start would create from Python 3.13 on, for `join`."""
    make = getattr(threading, "_make_thread_handle", None)
    if make is None:
        yield
        return
    handle = make(threading.get_ident())
    setattr(thread, "_handle" if hasattr(thread, "_handle") else "_os_thread_handle", handle)  # renamed in 3.14
    try:
        yield
    finally:
        handle._set_done()


def _join(self: threading.Thread, timeout: float | None = None) -> None:
    here = current_task()
    task: RankTask | None = getattr(self, "_distsim_task", None)
    if here is None or task is None:
        _real_join(self, timeout)
        return
    if task is here:
        raise RuntimeError("cannot join current thread")
    if not task.finished and not here.wait_until(task.done, HostWait(f"thread {self.name!r} to end"), timeout):
        return
    meet_clock(here, task.clock)
    self._distsim_joined = True  # type: ignore[attr-defined]
    _real_join(self)


def _is_alive(self: threading.Thread) -> bool:
    here, task = current_task(), getattr(self, "_distsim_task", None)
    if task is None:
        return _real_is_alive(self)
    turns = None if here is None else task.port.facts.turns
    if here is not None and turns is not None and not hasattr(self, "_distsim_joined"):
        has_ended = turns.answer(
            here, "is_alive", lambda: bool(task.finished), HostWait(f"thread {self.name!r} to end")
        )
        if not has_ended:
            return has_ended is False or not task.finished
        self._distsim_joined = True  # type: ignore[attr-defined]
        meet_clock(here, task.clock)
    return not task.finished


_real_job_done = futures.Future.done


def _job_done(self: Any) -> bool:
    """Replace `futures.Future.done`, of which an exploration knows one answer."""
    not_ordered("asks whether a job is done")
    return _real_job_done(self)


_real_current = threading.current_thread


def _enumerate(task: RankTask) -> list[threading.Thread]:
    """Return the threads of the running process only."""
    result = [_main_thread(task)]
    for reference in task.process.threads.others:
        thread = reference()
        if thread is not None and not thread._distsim_task.finished:  # type: ignore[attr-defined]
            result.append(thread)
    return result


def _make_invoke_excepthook() -> Any:
    """Return torch's replacement of threading's hook that ignores the exception by which a simulation ends its
    threads.
    """
    invoke = _real_make_invoke()

    def call(thread: threading.Thread) -> None:
        error = sys.exception()
        if isinstance(error, Unwind):
            return
        if error is not None:
            ended_thread(error, thread.name)
        invoke(thread)

    return call


_real_make_invoke = threading._make_invoke_excepthook  # type: ignore[attr-defined]


def _current_thread(task: RankTask) -> threading.Thread:
    return _main_thread(task) if task is task.process.main_task else _real_current()


def _main_thread(task: RankTask) -> threading.Thread:
    """Return the main thread of the running process, created at first use."""
    process = task.process
    if process.threads.main is None:
        process.threads.main = MainThread(process)
    return process.threads.main


class MainThread(threading._DummyThread):
    """Main thread of a simulated process, whichever thread asks for it first."""

    def __init__(self, process: SimProcess) -> None:
        task = process.main_task
        assert task is not None
        threading.Thread.__init__(self, name="MainThread", daemon=False)  # what it starts is no daemon either
        self._started.set()  # type: ignore[attr-defined]
        self._ident, self._native_id = task.ident, os.getpid()  # as Linux numbers a process's first thread


def _new_name(task: RankTask, name_template: str) -> str:
    if name_template.startswith("Dummy"):  # stands for a thread that Python did not start
        return name_template % 0
    return str(name_template % next(task.process.threads.names))


def _pool_number(task: RankTask) -> int:
    """Return the number of the next thread pool of the process."""
    return int(next(task.process.threads.pool_numbers))


_real_submit = pool_threads.ThreadPoolExecutor.submit


def _submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Replace `ThreadPoolExecutor.submit`: in an exploration a job has a name and a clock, whichever thread runs it."""
    task = current_task()
    turns = None if task is None else task.port.facts.turns
    if task is None or turns is None:
        return _real_submit(self, fn, *args, **kwargs)
    name = name_of(task)
    rank = str(task.process.rank)
    name = f"{rank}@{name}#{turns.number('request', name, rank)}"
    return _real_submit(self, _Job(fn, name, task.clock, self._max_workers == 1), *args, **kwargs)


class _Job:
    """Job of an executor in an exploration.

    With one thread a job follows the one before it. With more, a free thread is all that it needs.
    """

    def __init__(self, function: Callable[..., Any], name: str, clock: Clock, follows: bool) -> None:
        self._function, self._name, self._clock, self._follows = function, name, clock, follows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        task = require_task()
        before, clock = task.label, task.clock
        task.label, task.clock = self._name, joined(self._clock, clock) if self._follows else self._clock
        try:
            return self._function(*args, **kwargs)
        finally:
            task.label = before


def close_pools(tasks: list[RankTask]) -> None:
    """Shut down executors after their work is done, as Python does at exit."""
    for thread, work_queue in list(pool_threads._threads_queues.items()) if pool_threads._threads_queues else ():
        if getattr(thread, "_distsim_task", None) in tasks:
            executor = thread._args[0]() if getattr(thread, "_args", None) else None
            if executor is not None:
                executor._shutdown = True
            work_queue.put(None)


_real_select = selectors.EpollSelector.select


def _select(task: RankTask, self: selectors.EpollSelector, timeout: float | None = None) -> Any:
    """Replace asyncio's wait: it ends when another simulated thread wakes the loop, or after virtual time."""
    give_up_s = None if timeout is None else task.now_s() + max(0.0, timeout)
    own_pipe = next(iter(self.get_map()), None)  # through which other threads wake the loop: registered first
    while not (ready := _real_select(self, 0)):
        left_s = None if give_up_s is None else give_up_s - task.now_s()
        if left_s is not None and left_s <= 0:
            break
        if ready := _from_real_child(self, task):
            break
        task.wait_until(task.port.poll_event(0), HostWait("its asyncio loop"), left_s)
    if any(key.fd != own_pipe for key, _ in ready):
        task.process.family.real_children.answered()
    return ready


def _from_real_child(loop: selectors.EpollSelector, task: RankTask) -> Any:
    """Let wall time pass at a fixed virtual time until the real program at the other end of a connection of *loop*
    sends something."""
    children, main = task.process.family.real_children, task.process.main_task
    if not children.wall_s or len(loop.get_map()) < 2:  # one is the loop's own pipe
        return []
    next_s, why = float(task.port.next_event_s), None if main is None else main.wait_reason
    is_only = next_s == float("inf")
    if next_s <= task.now_s() or not (main is task or why == OWN_THREADS or (is_only and isinstance(why, HostWait))):
        return []
    return children.wait(lambda left_s: _real_select(loop, left_s), is_only)


def thread_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for everything a thread can block in."""
    executor = pool_threads.ThreadPoolExecutor
    return [
        patch_for_ranks(threading, "enumerate", _enumerate),
        patch_for_ranks(threading, "active_count", lambda task: len(_enumerate(task))),
        patch_for_ranks(threading, "current_thread", _current_thread),
        patch_for_ranks(threading, "main_thread", _main_thread),
        patch_for_ranks(threading, "_newname", _new_name),
        (threading, "_make_invoke_excepthook", _make_invoke_excepthook),
        (executor, "_counter", staticmethod(for_ranks(executor._counter, _pool_number))),  # type: ignore[attr-defined]
        (pool_threads, "_global_shutdown_lock", CoopLock()),
        patch_for_ranks(selectors.EpollSelector, "select", _select),
        (threading, "_allocate_lock", CoopLock if threading._allocate_lock is threading.Lock else _allocate_lock),  # type: ignore[attr-defined]
        (threading, "Lock", CoopLock),
        (queue.Queue, "get", _getter(queue.Queue.get)),
        (queue.Queue, "put", _putter(queue.Queue.put)),
        (executor, "submit", _submit),
        (threading, "RLock", threading._PyRLock),  # type: ignore[attr-defined]
        patch_for_ranks(threading.Thread, "start", _start),
        (threading.Thread, "join", _join),
        (threading.Thread, "is_alive", _is_alive),
        (threading.Event, "is_set", _is_set),
        (futures.Future, "done", _job_done),
        (queue, "SimpleQueue", _SimpleQueue),
    ]
