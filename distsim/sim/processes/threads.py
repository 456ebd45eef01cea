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
from typing import Any

import torch

from distsim.debug.evidence.watched_source import ended_thread
from distsim.debug.records import HostWait
from distsim.sim.c10d.backend import adopt_groups
from distsim.sim.device.cpu import CpuRates
from distsim.sim.device.dispatch import ComputeMode
from distsim.sim.isolation.process import RankTask, SimProcess, current_process, current_task, require_task
from distsim.sim.kernel.clocks import START, Clock, joined
from distsim.sim.kernel.scheduler import Event, Unwind
from distsim.sim.kernel.steps import Access, Objects
from distsim.sim.kernel.turns import TurnQueue, TurnRequest, locking_line, meet_clock, name_of
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
        self._name: Hashable = id(self)
        if task is not None and turns is not None:
            kind = "lock" if locking_line(sys._getframe(1)) else "a library's lock"  # those of a first run may be more
            self._name = kind, name_of(task), turns.number(kind, name_of(task))
        self._released: Clock = START
        """In an exploration, what happens before its last release."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = current_task()
        if task is None:
            return self._real.acquire(blocking, timeout)
        if task.port.facts.turns is not None:
            self._take_turn(task.port.facts.turns, task, blocking and timeout == -1)
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

    def _take_turn(self, turns: TurnQueue, task: RankTask, blocks: bool) -> None:
        """In an exploration, wait until the lock is free and it is this thread's turn, unless torch takes it."""
        if task.within_turn:
            return
        frame = sys._getframe(2)
        caller = locking_line(frame)
        if caller is None or frame.f_code is _IS_OWNED:  # a condition only asks whether it holds its lock
            meet_clock(task, self._released)
        elif not blocks:
            turns.does("tries a lock, or waits for it with a limit")
        else:
            lock = TurnRequest(
                "lock",
                caller.line,
                {self.key: Access.WRITE},
                is_possible=lambda: not self._real.locked(),
                released=lambda: self._released,
            )
            task.held_by = self._holder
            turns.ask(task, lock, OWN_THREADS, None, explicit=False)

    @property
    def key(self) -> Hashable:
        """Return the name of the lock, which is the same in all runs."""
        return self._name

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
    """Replace `threading.Event.is_set`, which takes no lock: an exploration knows no order of it."""
    task = current_task()
    turns = None if task is None else task.port.facts.turns
    if turns is not None and sys._getframe(1).f_code.co_filename not in _OF_THREADS:
        turns.does("asks whether an event is set")
    return _real_is_set(self)


class _SimpleQueue(queue._PySimpleQueue):  # type: ignore[name-defined]
    """`queue.SimpleQueue` in Python, which adds an item without a lock: an exploration knows no order of it."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        task = current_task()
        if task is not None and task.port.facts.turns is not None:
            task.port.facts.turns.does("puts into a queue.SimpleQueue")
        super().put(item, block, timeout)


_OF_THREADS = (threading.__file__, __file__)
"""Files that ask events of their own."""
_real_get, _real_put = queue.Queue.get, queue.Queue.put


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


def _get(self: Any, block: bool = True, timeout: float | None = None) -> Any:
    """Replace `queue.Queue.get`: in an exploration an item is taken in one turn."""
    task = current_task()
    if timeout is not None or task is None or task.port.facts.turns is None:
        return _real_get(self, block, timeout)
    pushed: deque[int] = vars(self).setdefault("_distsim_pushed", deque())
    index = _in_one_turn(
        self,
        "queue get",
        lambda: not block or self._qsize() > 0,
        lambda: frozenset(itertools.islice(pushed, 1)) if block else frozenset(),
    )
    if index is None:
        return _real_get(self, block, timeout)
    with _within_turn():
        item = _real_get(self, block, timeout)
    if pushed:
        pushed.popleft()
    return item


def _put(self: Any, item: Any, block: bool = True, timeout: float | None = None) -> None:
    """Replace `queue.Queue.put`: in an exploration an item is added in one turn."""
    index, task = None, current_task()
    if timeout is None and task is not None and task.port.facts.turns is not None:
        has_room = lambda: not block or self.maxsize <= 0 or self._qsize() < self.maxsize  # noqa: E731
        index = _in_one_turn(self, "queue put", has_room, frozenset)
    if index is None:
        _real_put(self, item, block, timeout)
        return
    with _within_turn():
        _real_put(self, item, block, timeout)
    vars(self).setdefault("_distsim_pushed", deque()).append(index)


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


_real_start = threading.Thread.start
_real_join = threading.Thread.join
_real_is_alive = threading.Thread.is_alive


def _start(self: threading.Thread) -> None:
    parent = current_task()
    if parent is None:
        _real_start(self)
        return
    if self._started.is_set():  # type: ignore[attr-defined]
        raise RuntimeError("threads can only be started once")
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
    _real_join(self)


def _is_alive(self: threading.Thread) -> bool:
    task: RankTask | None = getattr(self, "_distsim_task", None)
    if task is not None and task.port.facts.turns is not None:
        task.port.facts.turns.does("asks whether a thread is alive")
    return _real_is_alive(self) if task is None else not task.finished


_real_enumerate = threading.enumerate
_real_current, _real_main = threading.current_thread, threading.main_thread
_real_new_name = threading._newname  # type: ignore[attr-defined]


def _enumerate() -> list[threading.Thread]:
    """Return the threads of the running process only."""
    process = current_process()
    if process is None:
        return _real_enumerate()
    result = [_main_thread()]
    for reference in process.threads.others:
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


def _active_count() -> int:
    return len(_enumerate())


def _current_thread() -> threading.Thread:
    task = current_task()
    return _main_thread() if task is not None and task is task.process.main_task else _real_current()


def _main_thread() -> threading.Thread:
    """Return the main thread of the running process, created at first use."""
    process = current_process()
    if process is None:
        return _real_main()
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


def _new_name(name_template: str) -> str:
    process = current_process()
    if process is None:
        return str(_real_new_name(name_template))
    if name_template.startswith("Dummy"):  # stands for a thread that Python did not start
        return name_template % 0
    return str(name_template % next(process.threads.names))


_real_pool_number = pool_threads.ThreadPoolExecutor._counter  # type: ignore[attr-defined]


def _pool_number() -> int:
    """Return the number of the next thread pool of the process."""
    process = current_process()
    if process is None:
        return int(_real_pool_number())
    if process.port.facts.turns is not None:
        process.port.facts.turns.does("uses a pool of threads")
    return int(next(process.threads.pool_numbers))


def close_pools(tasks: list[RankTask]) -> None:
    """Shut down executors after their work is done, as Python does at exit."""
    for thread, work_queue in list(pool_threads._threads_queues.items()) if pool_threads._threads_queues else ():
        if getattr(thread, "_distsim_task", None) in tasks:
            executor = thread._args[0]() if getattr(thread, "_args", None) else None
            if executor is not None:
                executor._shutdown = True
            work_queue.put(None)


_real_select = selectors.EpollSelector.select


def _select(self: selectors.EpollSelector, timeout: float | None = None) -> Any:
    """Replace asyncio's wait: it ends when another simulated thread wakes the loop, or after virtual time."""
    task = current_task()
    if task is None:
        return _real_select(self, timeout)
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
    return [
        (threading, "enumerate", _enumerate),
        (threading, "active_count", _active_count),
        (threading, "current_thread", _current_thread),
        (threading, "main_thread", _main_thread),
        (threading, "_newname", _new_name),
        (threading, "_make_invoke_excepthook", _make_invoke_excepthook),
        (pool_threads.ThreadPoolExecutor, "_counter", staticmethod(_pool_number)),
        (selectors.EpollSelector, "select", _select),
        (threading, "_allocate_lock", CoopLock if threading._allocate_lock is threading.Lock else _allocate_lock),  # type: ignore[attr-defined]
        (threading, "Lock", CoopLock),
        (queue.Queue, "get", _get),
        (queue.Queue, "put", _put),
        (threading, "RLock", threading._PyRLock),  # type: ignore[attr-defined]
        (threading.Thread, "start", _start),
        (threading.Thread, "join", _join),
        (threading.Thread, "is_alive", _is_alive),
        (threading.Event, "is_set", _is_set),
        (queue, "SimpleQueue", _SimpleQueue),
    ]
