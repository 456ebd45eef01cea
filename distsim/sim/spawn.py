"""Processes that a program starts itself: `mp.spawn`, `multiprocessing.Process`.

They become simulated processes. A script whose first act is to start its ranks (as the tutorials
do) is run once, as a launcher outside the world; its children take the cluster's slots in order.
"""

from __future__ import annotations

import copy
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.synchronize
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.multiprocessing
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from distsim.debug.records import HostWait, Phase
from distsim.errors import NotSimulated
from distsim.sim.process import SimProcess
from distsim.sim.task import current_task, require_task

__all__ = ["spawn_patches"]

_TORCHRUN = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE "
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID "
    "TORCHELASTIC_ERROR_FILE"
).split()


def start_child(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], fork: bool, daemon: bool) -> SimProcess:
    """A new simulated process that calls *target*, in its own copy of the user's modules."""
    task = require_task()
    parent, world = task.process, task.world
    task.flush()
    if parent.is_rank and world.only_first_has_begun():
        world.become_launcher(parent)
        for name in _TORCHRUN:  # a plain `python script.py` has none of these, unless the script sets them
            if parent.environ.get(name.encode()) is parent.first_environ.get(name.encode()):
                parent.environ.pop(name.encode(), None)
    number = world.children_started
    world.children_started += 1
    slot = world.slots[number % len(world.slots)] if not parent.is_rank else parent.slot
    child = world.new_process(slot, dict(_decoded(parent.environ)), list(parent.argv), rank=number if not parent.is_rank else None)
    child.sys_path = list(parent.sys_path)
    child.program = parent.program
    args, kwargs = _copied(args), _copied(kwargs)

    def body() -> Any:
        return _resolve(target, parent, child, fork)(*args, **kwargs)

    world.start_process(child, body, daemon)
    return child


def _decoded(environ: dict[bytes, bytes]) -> list[tuple[str, str]]:
    return [(k.decode(errors="surrogateescape"), v.decode(errors="surrogateescape")) for k, v in environ.items()]


def _copied(value: Any) -> Any:
    """Arguments cross into another process by copy; what cannot be copied (queues, locks) is shared."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def _resolve(target: Callable[..., Any], parent: SimProcess, child: SimProcess, fork: bool) -> Callable[..., Any]:
    """*target* as the child knows it: from its own run of the main script."""
    if child.program is None or parent.main is None:
        return target
    streams = [s for s in (child.stdout, child.stderr) if s is not None] if fork else []
    for stream in streams:
        stream.muted = True  # a forked child does not run the script again: nothing is printed twice
    main = child.program.run_in(child, "__mp_main__")
    for stream in streams:
        stream.muted = False
    if fork:
        for name, value in parent.main.__dict__.items():
            if isinstance(value, bool | int | float | str | bytes) or name not in main.__dict__:
                if not name.startswith("__"):
                    main.__dict__[name] = value
    if getattr(target, "__module__", None) in ("__main__", "__mp_main__"):
        found: Any = main
        for part in getattr(target, "__qualname__", "").split("."):
            found = getattr(found, part, None)
        if callable(found):
            return found
    return target


# -- multiprocessing.Process

_Base = multiprocessing.process.BaseProcess
_real = {name: _Base.__dict__[name] for name in ("start", "join", "is_alive", "terminate", "kill", "close", "exitcode", "pid", "sentinel")}


def _child(process: Any) -> SimProcess | None:
    return getattr(process, "_distsim_child", None)


def _start(self: Any) -> None:
    if current_task() is None:
        _real["start"](self)
        return
    if _child(self) is not None:
        raise AssertionError("cannot start a process twice")
    fork = getattr(self, "_start_method", None) in (None, "fork")
    if fork and multiprocessing.get_start_method(allow_none=True) == "spawn":
        fork = False
    custom = type(self).run is not _Base.run
    target = self.run if custom or self._target is None else self._target
    args = () if target == self.run else tuple(self._args)
    kwargs = {} if target == self.run else dict(self._kwargs)
    self._distsim_child = start_child(target, args, kwargs, fork, bool(self.daemon))


def _join(self: Any, timeout: float | None = None) -> None:
    child = _child(self)
    if child is None:
        _real["join"](self, timeout)
        return
    _wait_for(child, timeout)


def _wait_for(child: SimProcess, timeout: float | None) -> bool:
    if not child.ended.triggered:
        expired = TimeoutError()
        try:
            why = HostWait("a child process to end", (child.rank,) if child.is_rank else ())
            require_task().wait(child.ended, why, timeout, lambda: expired, timeout is not None)
        except TimeoutError as exc:
            if exc is not expired:
                raise
            return False
    return True


def _is_alive(self: Any) -> bool:
    child = _child(self)
    if child is None:
        return bool(_real["is_alive"](self))
    if not child.ended.triggered:
        require_task().poll(HostWait("a child process to end"))
    return not child.ended.triggered


def _exitcode(self: Any) -> int | None:
    child = _child(self)
    if child is None:
        code: int | None = _real["exitcode"].__get__(self)
        return code
    return child.exit_code if child.ended.triggered else None


def _pid(self: Any) -> int | None:
    child = _child(self)
    return _real["pid"].__get__(self) if child is None else 4_194_304 + child.index  # above Linux's largest pid


def _terminate(self: Any) -> None:
    child = _child(self)
    if child is None:
        _real["terminate"](self)
    elif not child.ended.triggered:
        require_task().world.kill_process(child, "SIGTERM", -15)


# -- torch.multiprocessing.spawn


class SpawnContext:
    """What `start_processes(join=False)` answers."""

    def __init__(self, children: list[SimProcess]) -> None:
        self._children = children
        self.processes = children

    def pids(self) -> list[int]:
        return [4_194_304 + child.index for child in self._children]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """True when all have ended well; raises torch's own errors for the first that did not."""
        task = require_task()
        left = [child for child in self._children if not child.ended.triggered]
        failed = next((c for c in self._children if c.ended.triggered and c.exit_code != 0), None)
        if failed is None and left:
            any_end = task.world.env.any_of([child.ended for child in left])
            ranks = tuple(c.rank for c in left if c.is_rank)
            expired = TimeoutError()
            try:
                task.wait(any_end, HostWait("its spawned processes to end", ranks), timeout, lambda: expired, timeout is not None)
            except TimeoutError as exc:
                if exc is not expired:
                    raise
                return False
            failed = next((c for c in self._children if c.ended.triggered and c.exit_code != 0), None)
        if failed is None:
            return all(child.ended.triggered for child in self._children)
        for child in self._children:
            if not child.ended.triggered:
                task.world.kill_process(child, "SIGTERM", -15)
        index = self._children.index(failed)
        if failed.phase is Phase.RAISED:
            text = f"\n\n-- Process {index} terminated with the following error:\n{failed.traceback_text}"
            raise ProcessRaisedException(text, index, 4_194_304 + failed.index)
        raise ProcessExitedException(
            f"process {index} terminated with exit code {failed.exit_code}", index, 4_194_304 + failed.index, failed.exit_code or 1
        )


_real_start_processes = torch.multiprocessing.start_processes


def _start_processes(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    **kwargs: Any,
) -> SpawnContext | None:
    if current_task() is None:
        return _real_start_processes(fn, args, nprocs, join, daemon, start_method, **kwargs)  # type: ignore[return-value]
    fork = start_method == "fork"
    children = [start_child(fn, (i, *args), {}, fork, daemon) for i in range(nprocs)]
    context = SpawnContext(children)
    if not join:
        return context
    while not context.join():
        pass
    return None


def _spawn(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, daemon: bool = False, start_method: str = "spawn") -> Any:
    return _start_processes(fn, args, nprocs, join, daemon, start_method)


# -- what processes share


class _SharedQueue(queue.Queue[Any]):
    """`multiprocessing.Queue` between simulated processes."""

    def __init__(self, maxsize: int = 0, *, ctx: Any = None) -> None:
        super().__init__(max(0, maxsize))

    def __deepcopy__(self, memo: Any) -> _SharedQueue:
        return self

    def close(self) -> None:
        pass

    join_thread = cancel_join_thread = close


def _shared(base: type) -> Any:
    """A threading primitive with multiprocessing's constructor, shared rather than copied."""

    def __init__(self: Any, *args: Any, ctx: Any = None, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)  # type: ignore[misc]

    return type(base.__name__, (base,), {"__init__": __init__, "__deepcopy__": lambda self, memo: self})


def _switch(real: Any, simulated: Any) -> Any:
    """The simulated thing inside a rank, the real one elsewhere."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return (real if current_task() is None else simulated)(*args, **kwargs)

    return make


def _refused(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotSimulated(f"multiprocessing.{name}", "use Process, spawn, Queue, Event, Lock or Value")

    return refuse


def spawn_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of everything that starts or joins processes."""
    import multiprocessing.managers
    import multiprocessing.pool

    from distsim.sim.threads import CoopLock

    shared_lock = type("Lock", (CoopLock,), {"__init__": lambda self, *, ctx=None: CoopLock.__init__(self), "__deepcopy__": lambda self, memo: self})
    synchronize = multiprocessing.synchronize
    patches: list[tuple[Any, str, Any]] = [
        (multiprocessing.context._default_context, "_actual_context", None),  # set_start_method was not called yet
        (_Base, "start", _start),
        (_Base, "join", _join),
        (_Base, "is_alive", _is_alive),
        (_Base, "terminate", _terminate),
        (_Base, "kill", _terminate),
        (_Base, "exitcode", property(_exitcode)),
        (_Base, "pid", property(_pid)),
        (torch.multiprocessing, "spawn", _spawn),
        (torch.multiprocessing, "start_processes", _start_processes),
        (sys.modules["torch.multiprocessing.spawn"], "spawn", _spawn),
        (sys.modules["torch.multiprocessing.spawn"], "start_processes", _start_processes),
        (synchronize, "Lock", _switch(synchronize.Lock, shared_lock)),
    ]
    for name in ("Event", "Condition", "Semaphore", "BoundedSemaphore", "Barrier"):
        patches.append((synchronize, name, _switch(getattr(synchronize, name), _shared(getattr(threading, name)))))
    patches.append((synchronize, "RLock", _switch(synchronize.RLock, _shared(threading._PyRLock))))  # type: ignore[attr-defined]
    for name in ("Queue", "SimpleQueue", "JoinableQueue"):
        patches.append((multiprocessing.queues, name, _switch(getattr(multiprocessing.queues, name), _SharedQueue)))
    patches.append((multiprocessing.connection, "Pipe", _switch(multiprocessing.connection.Pipe, _refused("Pipe"))))
    patches.append((multiprocessing.managers, "SyncManager", _switch(multiprocessing.managers.SyncManager, _refused("Manager"))))
    patches.append((multiprocessing.pool, "Pool", _switch(multiprocessing.pool.Pool, _refused("Pool"))))
    torch_queue = sys.modules.get("torch.multiprocessing.queue")
    if torch_queue is not None:
        for name in ("Queue", "SimpleQueue"):
            patches.append((torch_queue, name, _switch(getattr(torch_queue, name), _SharedQueue)))
    return patches
