"""What simulated processes share: `multiprocessing`'s queues, pipes, locks, events.

They live in one Python process, so they are threading's primitives with multiprocessing's
constructors. Sent to another process, each stays the same object.
"""

from __future__ import annotations

import functools
import multiprocessing.context
import multiprocessing.managers
import multiprocessing.pool
import multiprocessing.queues
import multiprocessing.synchronize
import os
import pickle
import queue
import sys
import threading
from concurrent.futures import process as process_pool
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import simpy

from distsim.errors import NotSimulated
from distsim.sim.isolation.process import current_task, require_task
from distsim.sim.isolation.wraps import class_for_ranks, refusing_class
from distsim.sim.processes.threads import CoopLock

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess

__all__ = ["Shared", "Waitable", "crossing", "pickled", "sharing_patches"]


def _find(number: int) -> Any:
    found = require_task().world.host.shared[number]
    found.arrived(require_task().process)
    return found


class Shared:
    """Crosses between processes as itself."""

    def departs(self) -> None:
        """This is on its way to some process."""

    def arrived(self, process: SimProcess) -> None:
        """*process* has been given this."""

    def __reduce__(self) -> Any:
        self.departs()
        _departed.append(self)
        shared = require_task().world.host.shared
        number = self.__dict__.get("_number")
        if number is None or shared[number] is not self:
            number = self._number = len(shared)
            shared.append(self)
        return _find, (number,)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Waitable:
    """What `multiprocessing.connection.wait` takes: something that becomes ready."""

    def ready(self) -> bool:
        """Whether there is something, or nothing can come."""
        raise NotImplementedError

    def signs(self) -> list[simpy.Event]:
        """What may make it ready."""
        raise NotImplementedError


class _Reader(Waitable):
    """`_reader` of a queue."""

    def __init__(self, source: Queue) -> None:
        self._source = source
        self._waiting: list[simpy.Event] = []

    def ready(self) -> bool:
        return not self._source.empty()

    def signs(self) -> list[simpy.Event]:
        self._waiting.append(require_task().world.env.event())
        return self._waiting[-1:]

    def poll(self, timeout: float = 0.0) -> bool:
        return self.ready()

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            if not event.triggered:
                event.succeed()


_departed: list[Shared] = []
"""What is shared in that which is being pickled."""


class _Crossing:
    """What multiprocessing's reductions ask while a child is started: shared memory crosses as a file
    descriptor of its own."""

    def duplicate_for_child(self, descriptor: int) -> int:
        return os.dup(descriptor)

    class DupFd:
        def __init__(self, descriptor: int) -> None:
            self._descriptor = descriptor

        def detach(self) -> int:
            return self._descriptor


def pickled(value: Any) -> Any:
    """*value* as it crosses into another simulated process."""
    return crossing(value)[0]


def crossing(value: Any) -> tuple[Any, list[Shared]]:
    """*value* as it crosses, and the shared things in it."""
    _departed.clear()
    multiprocessing.context.set_spawning_popen(_Crossing())  # type: ignore[arg-type]
    try:
        return ForkingPickler.dumps(value), list(_departed)
    finally:
        multiprocessing.context.set_spawning_popen(None)


class Queue(Shared, queue.Queue[Any]):
    """`multiprocessing.Queue`, `SimpleQueue` and `JoinableQueue`. An item is made anew by who gets it."""

    def __init__(self, maxsize: int = 0, *, ctx: Any = None) -> None:
        super().__init__(max(0, maxsize))
        self._reader = _Reader(self)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(pickled(item), block, timeout)
        self._reader.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return pickle.loads(super().get(block, timeout))

    def close(self) -> None:
        """Nothing to close: the items are in memory."""

    join_thread = cancel_join_thread = close


def _with_context(base: type, name: str) -> type:
    """A threading primitive with multiprocessing's constructor."""

    def __init__(self: Any, *args: Any, ctx: Any = None, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)  # type: ignore[misc]

    return type(name, (Shared, base), {"__init__": __init__})


def _not_simulated(name: str) -> NotSimulated:
    return NotSimulated(name, "use Process, spawn, ThreadPool, Queue, Pipe, Event or Lock")


def _pool_init(real: Any) -> Any:
    """A pool of processes is refused; `ThreadPool` is a subclass that needs threads only."""

    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if current_task() is not None and not isinstance(self, multiprocessing.pool.ThreadPool):
            self._state = multiprocessing.pool.TERMINATE  # its __del__ asks
            raise _not_simulated("multiprocessing.Pool")
        real(self, *args, **kwargs)

    return init


def _executor_init(real: Any) -> Any:
    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if current_task() is not None:
            raise _not_simulated("concurrent.futures.ProcessPoolExecutor")
        real(self, *args, **kwargs)

    return init


def sharing_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of everything that processes share."""
    synchronize, queues = multiprocessing.synchronize, multiprocessing.queues
    patches: list[tuple[Any, str, Any]] = [
        (synchronize, "Lock", class_for_ranks(synchronize.Lock, _with_context(CoopLock, "Lock"))),
        (synchronize, "RLock", class_for_ranks(synchronize.RLock, _with_context(threading._PyRLock, "RLock"))),  # type: ignore[attr-defined]
    ]
    for name in ("Event", "Condition", "Semaphore", "BoundedSemaphore", "Barrier"):
        simulated = _with_context(getattr(threading, name), name)
        patches.append((synchronize, name, class_for_ranks(getattr(synchronize, name), simulated)))
    for holder in (queues, sys.modules.get("torch.multiprocessing.queue")):
        plain: type = Queue
        for name in ("Queue", "SimpleQueue", "JoinableQueue"):
            if hasattr(holder, name):
                stand_in = class_for_ranks(getattr(holder, name), Queue if name == "SimpleQueue" else plain)
                plain = stand_in if name == "Queue" else plain  # a JoinableQueue is a Queue
                patches.append((holder, name, stand_in))
    manager, executor = multiprocessing.managers.SyncManager, process_pool.ProcessPoolExecutor
    patches += [
        (
            multiprocessing.managers,
            "SyncManager",
            refusing_class(manager, lambda: _not_simulated("multiprocessing.Manager")),
        ),
        (multiprocessing.pool.Pool, "__init__", _pool_init(multiprocessing.pool.Pool.__init__)),
        (executor, "__init__", _executor_init(executor.__init__)),
    ]
    return patches
