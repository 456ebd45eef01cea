"""What simulated processes share: `multiprocessing`'s queues, pipes, locks, events.

They live in one Python process, so they are threading's primitives with multiprocessing's
constructors. Sent to another process, each stays the same object.
"""

from __future__ import annotations

import multiprocessing.connection
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
from collections import deque
from concurrent.futures import process as process_pool
from multiprocessing.reduction import ForkingPickler
from typing import Any

from distsim.errors import NotSimulated
from distsim.sim.task import current_task, require_task
from distsim.sim.threads import CoopLock

__all__ = ["pickled", "sharing_patches"]


def _find(number: int) -> Any:
    return require_task().world.host.shared[number]


class _Shared:
    """Crosses between processes as itself."""

    def __reduce__(self) -> Any:
        shared = require_task().world.host.shared
        number = self.__dict__.get("_number")
        if number is None or shared[number] is not self:
            number = self._number = len(shared)
            shared.append(self)
        return _find, (number,)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def _copied(value: Any) -> Any:
    """What the other process gets of *value*: its own copy, made as multiprocessing makes it."""
    return pickle.loads(pickled(value))


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
    multiprocessing.context.set_spawning_popen(_Crossing())  # type: ignore[arg-type]
    try:
        return ForkingPickler.dumps(value)
    finally:
        multiprocessing.context.set_spawning_popen(None)


class Queue(_Shared, queue.Queue[Any]):
    """`multiprocessing.Queue`, `SimpleQueue` and `JoinableQueue`."""

    def __init__(self, maxsize: int = 0, *, ctx: Any = None) -> None:
        super().__init__(max(0, maxsize))

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(_copied(item), block, timeout)

    def close(self) -> None:
        """Nothing to close: the items are in memory."""

    join_thread = cancel_join_thread = close


class Connection(_Shared):
    """One end of a `multiprocessing.Pipe`."""

    def __init__(self, inbox: queue.Queue[Any], outbox: queue.Queue[Any], readable: bool, writable: bool) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._held: deque[Any] = deque()
        self.readable, self.writable = readable, writable
        self.closed = False

    def _check(self, may: bool, what: str) -> None:
        if self.closed:
            raise OSError("handle is closed")
        if not may:
            raise OSError(f"connection is {what}-only")

    def send(self, item: Any) -> None:
        self._check(self.writable, "read")
        self._outbox.put(_copied(item))

    def send_bytes(self, data: Any, offset: int = 0, size: int | None = None) -> None:
        self._check(self.writable, "read")
        self._outbox.put(bytes(memoryview(data)[offset : None if size is None else offset + size]))

    def poll(self, timeout: float | None = 0.0) -> bool:
        self._check(self.readable, "write")
        if not self._held:
            try:
                self._held.append(self._inbox.get(timeout=timeout) if timeout else self._inbox.get(timeout is None))
            except queue.Empty:
                return False
        return True

    def recv(self) -> Any:
        self.poll(None)
        return self._held.popleft()

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        return bytes(self.recv())

    def close(self) -> None:
        """Only the handle of the process that closes it is meant; the other processes' ends stay open."""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _pipe(duplex: bool = True) -> tuple[Connection, Connection]:
    one, other = queue.Queue[Any](), queue.Queue[Any]()
    return Connection(one, other, True, duplex), Connection(other, one, duplex, True)


def _with_context(base: type, name: str) -> type:
    """A threading primitive with multiprocessing's constructor."""

    def __init__(self: Any, *args: Any, ctx: Any = None, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)  # type: ignore[misc]

    return type(name, (_Shared, base), {"__init__": __init__})


def _switch(real: Any, simulated: Any) -> Any:
    """The simulated thing inside a rank, the real one elsewhere."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return (real if current_task() is None else simulated)(*args, **kwargs)

    return make


def _refused(real: Any, name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotSimulated(name, "use Process, spawn, Queue, Pipe, Event, Lock or Value")

    return _switch(real, refuse)


def sharing_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of everything that processes share."""
    synchronize, queues = multiprocessing.synchronize, multiprocessing.queues
    patches: list[tuple[Any, str, Any]] = [
        (multiprocessing.connection, "Pipe", _switch(multiprocessing.connection.Pipe, _pipe)),
        (synchronize, "Lock", _switch(synchronize.Lock, _with_context(CoopLock, "Lock"))),
        (synchronize, "RLock", _switch(synchronize.RLock, _with_context(threading._PyRLock, "RLock"))),  # type: ignore[attr-defined]
    ]
    for name in ("Event", "Condition", "Semaphore", "BoundedSemaphore", "Barrier"):
        simulated = _with_context(getattr(threading, name), name)
        patches.append((synchronize, name, _switch(getattr(synchronize, name), simulated)))
    for holder in (queues, sys.modules.get("torch.multiprocessing.queue")):
        for name in ("Queue", "SimpleQueue", "JoinableQueue"):
            if hasattr(holder, name):
                patches.append((holder, name, _switch(getattr(holder, name), Queue)))
    manager, pool, executor = (
        multiprocessing.managers.SyncManager,
        multiprocessing.pool.Pool,
        process_pool.ProcessPoolExecutor,
    )
    patches += [
        (multiprocessing.managers, "SyncManager", _refused(manager, "multiprocessing.Manager")),
        (multiprocessing.pool, "Pool", _refused(pool, "multiprocessing.Pool")),
        (executor, "__init__", _refused(executor.__init__, "concurrent.futures.ProcessPoolExecutor")),
    ]
    torch_pool = sys.modules.get("torch.multiprocessing.pool")
    if torch_pool is not None:
        patches.append((torch_pool, "Pool", _refused(torch_pool.Pool, "torch.multiprocessing.Pool")))
    return patches
