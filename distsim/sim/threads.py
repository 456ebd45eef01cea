"""Threads and locks of a rank: cooperative, so that whoever waits gives the baton away.

`threading`'s pure Python primitives (Condition, Event, Semaphore, Barrier, Queue) stand on its
locks; so replacing the lock, `Thread.start`, `join` and `is_alive` is enough.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections import deque
from typing import Any

import simpy

from distsim.debug.records import HostWait
from distsim.sim.task import Task, Unwind, current_task

__all__ = ["CoopLock", "thread_patches"]


class CoopLock:
    """`threading.Lock` inside a rank; an ordinary lock outside a simulation."""

    def __init__(self) -> None:
        self._real = _thread.allocate_lock()
        self._waiters: deque[simpy.Event] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = current_task()
        if task is None:
            return self._real.acquire(blocking, timeout)
        if self._real.acquire(False):
            return True
        if not blocking:
            return False
        if timeout < 0 and timeout != -1:
            raise ValueError("timeout value must be a non-negative number")
        expired = TimeoutError()
        give_up_s = None if timeout < 0 else task.now_s() + timeout
        while True:
            event = task.world.env.event()
            self._waiters.append(event)
            left = None if give_up_s is None else max(0.0, give_up_s - task.now_s())
            try:
                task.wait(event, HostWait("a lock, condition or queue of its own threads"), left, lambda: expired, True)
            except TimeoutError as exc:
                if exc is not expired:
                    raise
                if event in self._waiters:
                    self._waiters.remove(event)
                return False
            except Unwind:
                if event in self._waiters:
                    self._waiters.remove(event)
                raise
            if self._real.acquire(False):
                return True

    def release(self) -> None:
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
    with threading._active_limbo_lock:  # type: ignore[attr-defined]
        threading._limbo[self] = self  # type: ignore[attr-defined]

    def body() -> None:
        from distsim.sim.rank import prepare_thread

        prepare_thread(process)
        self._bootstrap()  # type: ignore[attr-defined]

    task = parent.world.start_task(process, body, self.name, daemon=self.daemon)
    self._distsim_task = task  # type: ignore[attr-defined]


def _join(self: threading.Thread, timeout: float | None = None) -> None:
    here = current_task()
    task: Task | None = getattr(self, "_distsim_task", None)
    if here is None or task is None:
        _real_join(self, timeout)
        return
    if task is here:
        raise RuntimeError("cannot join current thread")
    if not task.finished:
        expired = TimeoutError()
        try:
            here.wait(task.done, HostWait(f"thread {self.name!r} to end"), timeout, lambda: expired, timeout is not None)
        except TimeoutError as exc:
            if exc is not expired:
                raise
            return
    _real_join(self)


def _is_alive(self: threading.Thread) -> bool:
    task: Task | None = getattr(self, "_distsim_task", None)
    return _real_is_alive(self) if task is None else not task.finished


def thread_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of everything a thread can block in."""
    return [
        (threading, "_allocate_lock", CoopLock),
        (threading, "Lock", CoopLock),
        (threading, "RLock", threading._PyRLock),  # type: ignore[attr-defined]
        (threading.Thread, "start", _start),
        (threading.Thread, "join", _join),
        (threading.Thread, "is_alive", _is_alive),
        (queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]
    ]
