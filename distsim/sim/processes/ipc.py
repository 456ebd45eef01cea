"""Objects that simulated processes share: `multiprocessing`'s queues, pipes, locks, events."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.dummy
import multiprocessing.managers
import multiprocessing.pool
import multiprocessing.queues
import multiprocessing.synchronize
import os
import pickle
import queue
import sys
import threading
from collections import UserDict, UserList, deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import process as process_pool
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from distsim.debug.records import HostWait
from distsim.errors import NotSimulated
from distsim.sim.isolation.for_ranks import for_ranks, patch_for_ranks
from distsim.sim.isolation.modules.aliases import ALIASES
from distsim.sim.isolation.process import RankTask, current_process, current_task, not_ordered, require_task
from distsim.sim.isolation.wraps import class_for_ranks
from distsim.sim.kernel.clocks import START
from distsim.sim.kernel.scheduler import Event
from distsim.sim.kernel.steps import Access
from distsim.sim.kernel.turns import Moment
from distsim.sim.orders.processes import PipeEnd, Waitable, end_of, take_turn, wait_for_any
from distsim.sim.processes.threads import CoopLock

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess

# -- What simulated processes share: `multiprocessing`'s queues, pipes, locks, events.
#
# They live in one Python process, so they are threading's primitives with multiprocessing's
# constructors. Sent to another process, each stays the same object.


def _find(number: int) -> Any:
    result = require_task().process.interpreter.host.shared[number]
    result.arrived(require_task().process)
    return result


class Shared:
    """Crosses between processes as itself."""

    def departs(self) -> None:
        """Mark the item as being on its way to a process."""

    def arrived(self, process: SimProcess) -> None:
        """Note that *process* has received this object."""

    def __reduce__(self) -> Any:
        self.departs()
        _departed.append(self)
        shared = require_task().process.interpreter.host.shared
        number = self.__dict__.get("_number")
        if number is None or shared[number] is not self:
            number = self._number = len(shared)
            shared.append(self)
        return _find, (number,)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class _Reader(Waitable):
    """`_reader` of a queue."""

    def __init__(self, source: Queue) -> None:
        self._source = source
        self._waiting: list[Event] = []

    def ready(self) -> bool:
        return self._source._qsize() > 0

    def objects(self) -> dict[Hashable, Access]:
        mutex: Any = self._source.mutex
        return {mutex.key: Access.READ}

    def moments(self) -> list[Moment]:
        return [(step, START) for step in itertools.islice(vars(self._source).get("_distsim_pushed", ()), 1)]

    def poll(self, timeout: float = 0.0) -> bool:
        return not self._source.empty()


_departed: list[Shared] = []
"""Shared objects inside the object that is being pickled."""


class _Crossing:
    """State that multiprocessing's reductions ask for while a child starts: shared memory is passed as a file
    descriptor."""

    def duplicate_for_child(self, descriptor: int) -> int:
        return os.dup(descriptor)

    class DupFd:
        def __init__(self, descriptor: int) -> None:
            self._descriptor = descriptor

        def detach(self) -> int:
            return self._descriptor


def pickled(value: Any) -> Any:
    """Return *value* as another simulated process receives it."""
    return crossing(value)[0]


def crossing(value: Any) -> tuple[Any, list[Shared]]:
    """Return *value* as another process receives it, and the shared objects in it."""
    _departed.clear()
    multiprocessing.context.set_spawning_popen(_Crossing())  # type: ignore[arg-type]
    try:
        return ForkingPickler.dumps(value), list(_departed)
    finally:
        multiprocessing.context.set_spawning_popen(None)


class Queue(Shared, queue.Queue[Any]):
    """`multiprocessing.Queue`, `SimpleQueue` and `JoinableQueue`. The receiver gets a new copy of an item."""

    def __init__(self, maxsize: int = 0, *, ctx: Any = None) -> None:
        super().__init__(max(0, maxsize))
        self._reader = _Reader(self)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(pickled(item), block, timeout)
        self._reader.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return pickle.loads(super().get(block, timeout))

    def close(self) -> None:
        """Do nothing: the items are in memory."""

    join_thread = cancel_join_thread = close


def _with_context(base: type, name: str) -> type:
    """Return a threading primitive with multiprocessing's constructor."""

    def __init__(self: Any, *args: Any, ctx: Any = None, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)  # type: ignore[misc]

    return type(name, (Shared, base), {"__init__": __init__})


# -- Pools of processes and managers: what they hold and run is in the rank's own process.


class _PoolInside(multiprocessing.pool.ThreadPool):
    """`multiprocessing.Pool` of a rank: its tasks run one after the other, in a thread of the rank's process."""

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        context: Any = None,
    ) -> None:
        require_task().port.note(POOL_NOTE)
        super().__init__(1, initializer, initargs)

    @staticmethod
    def Process(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a worker, which has a pid as a process has."""
        worker = multiprocessing.dummy.DummyProcess(*args, **kwargs)
        worker.pid = os.getpid()  # type: ignore[attr-defined]
        return worker


POOL_NOTE = "tasks of multiprocessing.Pool and ProcessPoolExecutor run inside their rank's own process, one at a time"


def _pool_init(real: Any, _: RankTask, self: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(self, multiprocessing.pool.ThreadPool):
        real(self, *args, **kwargs)
        return
    self.__class__ = _PoolInside
    self.__init__(*args, **kwargs)


class _ExecutorInside(ThreadPoolExecutor):
    """`ProcessPoolExecutor` of a rank, likewise."""

    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: Any = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        **options: Any,
    ) -> None:
        require_task().port.note(POOL_NOTE)
        super().__init__(1, initializer=initializer, initargs=initargs)


class _Copying:
    """A container of a manager: elements are returned as copies, like by a proxy."""

    def __getitem__(self, key: Any) -> Any:
        return pickle.loads(pickled(super().__getitem__(key)))  # type: ignore[misc]


class _Dict(_Copying, Shared, UserDict[Any, Any]):
    """The dict of a manager, `Manager().dict()`."""


class _List(_Copying, Shared, UserList[Any]):
    """The list of a manager, `Manager().list()`."""


class _Namespace(Shared, SimpleNamespace):
    """The namespace of a manager, `Manager().Namespace()`."""


class _Manager:
    """`multiprocessing.Manager()` without a server process."""

    dict, list, Namespace, Queue, JoinableQueue = _Dict, _List, _Namespace, Queue, Queue
    Pool = _PoolInside

    def __init__(self) -> None:
        not_ordered("uses objects of a manager")

    def __getattr__(self, name: str) -> Any:
        if name in ("Lock", "RLock", "Event", "Condition", "Semaphore", "BoundedSemaphore", "Barrier"):
            return getattr(multiprocessing, name)
        raise NotSimulated(f"multiprocessing.Manager().{name}", "use its dict, list, Namespace, Queue, Pool or locks")

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because there is no server."""

    connect = shutdown = join = start

    def __enter__(self) -> _Manager:
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing, as `start`."""


def _for_ranks(real: type, inside: Callable[..., Any]) -> type:
    """Return a subclass of *real* that creates *inside*(...) when a rank instantiates it."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        if current_task() is None:
            return real(*args, **kwargs)
        if cls is not stand_in:
            raise NotSimulated(f"a subclass of {real.__name__}", f"use {real.__name__} itself")
        return inside(*args, **kwargs)

    stand_in = type(real.__name__, (real,), {"__new__": __new__})
    return stand_in


def sharing_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for everything that processes share."""
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
    pool = multiprocessing.pool.Pool
    patches += [
        (multiprocessing.managers, "SyncManager", _for_ranks(manager, lambda *args, **kwargs: _Manager())),
        patch_for_ranks(pool, "__init__", partial(_pool_init, pool.__init__)),
        *(
            (holder, "ProcessPoolExecutor", _for_ranks(executor, _ExecutorInside))
            for holder in (process_pool, concurrent.futures)
        ),
    ]
    return patches


# -- `multiprocessing.Pipe` between simulated processes, and `multiprocessing.connection.wait`.


class Sentinel(Waitable):
    """`Process.sentinel` of a simulated child, for `multiprocessing.connection.wait`."""

    def __init__(self, child: SimProcess) -> None:
        self.child = child

    def ready(self) -> bool:
        return bool(self.child.ended.triggered)

    def signs(self) -> list[Event]:
        return [self.child.ended]

    def objects(self) -> dict[Hashable, Access]:
        return {end_of(self.child): Access.READ}

    def moments(self) -> list[Moment]:
        return self.child.ending.moments


_MESSAGE = HostWait("a message through a pipe")


class Connection(Shared, Waitable):
    """One end of a `multiprocessing.Pipe`. Each process closes it separately.

    When no living process has the other end open, no more data can arrive.
    """

    _other: Connection

    def __init__(self, readable: bool, writable: bool) -> None:
        self.order = PipeEnd(require_task())
        self.readable, self.writable = readable, writable
        self._inbox: deque[bytes] = deque()
        self._holders: list[SimProcess] = []
        self._hold(require_task().process)
        self._on_its_way = 0
        self._closed_by: list[SimProcess] = []
        self._waiting: list[Event] = []

    def departs(self) -> None:
        self._on_its_way += 1

    def _hold(self, process: SimProcess) -> None:
        self._holders.append(process)
        process.notes.pipes.append(self)

    def arrived(self, process: SimProcess) -> None:
        if process not in self._holders:
            self._hold(process)
            self._on_its_way -= 1

    def inherited(self, parent: SimProcess, child: SimProcess) -> None:
        """Note that *child* was forked, so it holds the same ends open as its parent."""
        if parent not in self._closed_by and child not in self._holders:
            self._hold(child)

    @property
    def closed(self) -> bool:
        return current_process() in self._closed_by

    def _open(self) -> bool:
        return self._on_its_way > 0 or any(p.alive and p not in self._closed_by for p in self._holders)

    def is_open_in(self, process: SimProcess) -> bool:
        """Return whether *process* has it open."""
        return process in self._holders and process not in self._closed_by

    def _check(self, may: bool, mode: str) -> None:
        if self.closed:
            raise OSError("handle is closed")
        if not may:
            raise OSError(f"connection is {mode}-only")

    # -- waiting

    def ready(self) -> bool:
        return bool(self._inbox) or not self._other._open()

    def signs(self) -> list[Event]:
        return [*super().signs(), *(p.ended for p in self._other._holders if p.alive)]

    def objects(self) -> dict[Hashable, Access]:
        return dict.fromkeys([self.order.senders, self.order.receivers], Access.READ) | self._other._may_close()

    def _may_close(self) -> dict[Hashable, Access]:
        """Return what decides whether this end is open, unless the running process keeps it open itself."""
        process = require_task().process
        if len(process.tasks) == 1 and self.is_open_in(process):
            return {}
        return {self.order.openness: Access.READ}

    def moments(self) -> list[Moment]:
        return list(itertools.islice(self.order.sent, 1)) or self._other.order.closings

    # -- multiprocessing.connection.Connection

    def send(self, item: Any) -> None:
        self._check(self.writable, "read")
        self._put(bytes(pickled(item)))

    def send_bytes(self, data: Any, offset: int = 0, size: int | None = None) -> None:
        self._check(self.writable, "read")
        self._put(bytes(memoryview(data)[offset : None if size is None else offset + size]))

    def _put(self, data: bytes) -> None:
        task, other = require_task(), self._other.order
        if task.port.facts.turns is not None:
            accesses = {other.senders: Access.WRITE, **self._other._may_close()}
            other.sent.append(take_turn(task, "send", accesses))
        if not self._other._open():
            raise BrokenPipeError(32, "Broken pipe")
        self._other._inbox.append(data)
        self._other.wake()

    def poll(self, timeout: float | None = 0.0) -> bool:
        self._check(self.readable, "write")
        wait_for_any([self], timeout, _MESSAGE, "poll")
        return self.ready()

    def recv(self) -> Any:
        return pickle.loads(self.recv_bytes())

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        self._check(self.readable, "write")
        task = require_task()
        if task.port.facts.turns is not None:
            take_turn(task, "receive", {self.order.receivers: Access.WRITE}, _MESSAGE, self.ready, self.clock)
        wait_for_any([self], None, _MESSAGE)
        if not self._inbox:
            raise EOFError
        if maxlength is not None and len(self._inbox[0]) > maxlength:
            raise OSError("bad message length")
        if self.order.sent:
            self.order.sent.popleft()
        return self._inbox.popleft()

    def recv_bytes_into(self, buffer: Any, offset: int = 0) -> int:
        data = self.recv_bytes()
        view = memoryview(buffer).cast("B")
        if offset + len(data) > len(view):
            raise multiprocessing.BufferTooShort(data)
        view[offset : offset + len(data)] = data
        return len(data)

    def close(self) -> None:
        task = require_task()
        if not self.closed:
            if task.port.facts.turns is not None:
                self.order.closings.append(take_turn(task, "close", {self.order.openness: Access.ADD}))
            self._closed_by.append(task.process)
        self._other.wake()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _pipe(_: RankTask, duplex: bool = True) -> tuple[Connection, Connection]:
    one, other = Connection(True, duplex), Connection(duplex, True)
    one._other, other._other = other, one
    return one, other


def _connection_wait(
    real: Callable[..., Any], task: RankTask, object_list: Iterable[Any], timeout: float | None = None
) -> list[Any]:
    held = list(object_list)
    ours = [item for item in held if isinstance(item, Waitable)]
    if not ours:
        return list(real(held, timeout))
    for item in ours:
        if isinstance(item, Connection):
            item._check(item.readable, "write")
    others = [item for item in held if item not in ours]
    if others:  # real descriptors beside simulated ones: look at both in turn
        return _look(task, real, held, others, timeout)
    ranks = tuple(i.child.rank for i in ours if isinstance(i, Sentinel) and i.child.is_rank)
    only_children = all(isinstance(item, Sentinel) for item in ours)
    awaited = "its child processes to end" if only_children else "a message through a pipe, or a process's end"
    wait_for_any(ours, timeout, HostWait(awaited, ranks))
    return [item for item in held if item.ready()]


def _look(task: Any, real: Callable[..., Any], held: list[Any], others: list[Any], timeout: float | None) -> list[Any]:
    not_ordered("waits for a descriptor")
    give_up_s = None if timeout is None else task.now_s() + timeout
    while True:
        ready = real(others, 0)
        result = [item for item in held if (item in ready if item in others else item.ready())]
        if result or (give_up_s is not None and task.now_s() >= give_up_s):
            return result
        task.poll(HostWait("a process, pipe or descriptor to be ready"))


def pipe_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for pipes and of waiting for several things at once."""
    connection = multiprocessing.connection
    real_wait = connection.wait
    wait = for_ranks(real_wait, partial(_connection_wait, real_wait))
    patches = [patch_for_ranks(connection, "Pipe", _pipe)]
    patches += [(module, "wait", wait) for _, module, _, value in ALIASES.of("wait") if value is real_wait]
    return patches
