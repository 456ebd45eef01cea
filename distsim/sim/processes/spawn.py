"""Processes that a program starts itself: `mp.spawn`, `multiprocessing.Process`.

They become simulated processes: multiprocessing's own code runs, and only its last step, the
`Popen` that would fork, is ours. A script whose first act is to start its ranks (as the tutorials
do) is run once, as a launcher outside the world; its children take the cluster's slots in order.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.process
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed.launcher.api

from distsim.debug.records import HostWait
from distsim.errors import UsageError
from distsim.sim.isolation.process import SimProcess, current_task, require_task
from distsim.sim.isolation.wraps import keep_failure
from distsim.sim.processes.hosts import launcher_environ, place_environ, was_told_of_torchrun
from distsim.sim.processes.ipc import Sentinel, Shared, crossing, pipe_patches, wait_for_any
from distsim.sim.processes.signals import pid_of, send

__all__ = ["begin_multiprocessing", "end_children", "spawn_patches"]


def _start_no_rank() -> None:
    """The running process is about to start others. The first one, alone until now, is a launcher of ranks."""
    task = require_task()
    if task.process.is_rank and task.world.only_first_has_begun():
        task.world.become_launcher(task.process)
        launcher_environ(task.process)


def _new_child() -> SimProcess:
    """A simulated process, child of the running one. A launcher's children are the ranks."""
    _start_no_rank()
    task = require_task()
    parent, world = task.process, task.world
    task.flush()
    rank, slot = None, parent.slot
    if not parent.is_rank:
        held = {child.rank for child in parent.family.children if child.alive or not child.family.is_noticed}
        rank = next(number for number in itertools.count() if number not in held)
        slot = world.slots[rank % len(world.slots)]
    environ = dict(parent.environ)
    if rank is not None and was_told_of_torchrun(parent):
        environ |= place_environ(parent, rank)
    child: SimProcess = world.new_process(slot, environ, list(sys.argv), rank=rank)
    child.changed_environ = dict(parent.changed_environ)
    child.sys_path = list(sys.path)
    child.program = parent.program
    parent.family.children.append(child)
    child.family.parent = parent
    return child


class SimPopen:
    """Replacement for multiprocessing's `Popen`: one started child."""

    def __init__(self, process: Any, method: str) -> None:
        parent = require_task().process
        data, shared = self._pickled(process, must=method != "fork" and parent.program is not None)
        child = self._child = _new_child()
        child.family.is_forked = method == "fork"
        for item in shared:
            item.arrived(child)
        for pipe in parent.notes.pipes if method == "fork" else ():
            pipe.inherited(parent, child)
        self.pid = pid_of(child)
        self.sentinel = Sentinel(child)
        self.returncode: int | None = None
        name, identity, config = process.name, process._identity, process._config
        as_forked = multiprocessing.process.BaseProcess.__new__(type(process))
        as_forked.__dict__.update(process.__dict__)  # `start` takes the target from the original
        own = multiprocessing.process.current_process()
        parent_name, parent_pid = own.name, pid_of(parent)

        def program() -> None:
            current = multiprocessing.process.BaseProcess.__new__(type(process))
            current.__dict__.update(_name=name, _identity=identity, _config=dict(config), _popen=None, _closed=False)
            current.__dict__.update(_parent_pid=parent_pid, _parent_name=parent_name)
            multiprocessing.process._current_process = current  # type: ignore[attr-defined]
            multiprocessing.process._parent_process = multiprocessing.process._ParentProcess(  # type: ignore[attr-defined]
                parent_name, parent_pid, None
            )
            has_main = child.program is None or self._run_main(child, parent, method == "fork")
            started = as_forked if data is None or not has_main else pickle.loads(data)
            multiprocessing.process._current_process = started  # type: ignore[attr-defined]
            started.run()

        child.family.daemonic = bool(process.daemon)
        child.world.start_process(child, program)

    def _pickled(self, process: Any, must: bool) -> tuple[Any, list[Shared]]:
        """Return the pickled data for the child; None if a forked child has the parent's objects."""
        try:
            return crossing(process)
        except Exception:
            if must:
                raise
            return None, []

    def _run_main(self, child: SimProcess, parent: SimProcess, fork: bool) -> bool:
        """The child's own run of the main script, as spawned children do it. A forked child does not run
        it again: it prints nothing, and takes over the plain values and shared things its parent has by now. False: a
        forked child must use its parent's objects, because the script initializes its process group unguarded."""
        streams = [s for s in (child.stdout, child.stderr) if s is not None] if fork else []
        for stream in streams:
            stream.muted = True
        try:
            main = child.program.run_in(child, "__mp_main__")
        except Exception:
            if not fork or parent.c10d is None or parent.c10d.default_pg is None:
                raise
            return False
        finally:
            for stream in streams:
                stream.muted = False
        if fork and parent.main is not None:
            for name, value in parent.main.__dict__.items():
                plain = isinstance(value, bool | int | float | str | bytes)
                taken = plain or isinstance(value, Shared) or name not in main.__dict__
                if not name.startswith("__") and taken:
                    main.__dict__[name] = value
        return True

    # -- the interface of multiprocessing's Popen

    def poll(self, flag: int = 0) -> int | None:
        asked_by = sys._getframe(1)
        code = self._poll(flag)
        if code is not None and asked_by.f_code.co_name != "_cleanup":  # multiprocessing's own, before each start
            self._child.family.is_noticed = True
            reader = asked_by.f_back if asked_by.f_code.co_name == "exitcode" else None
            if reader is not None and reader.f_globals.get("__name__") != "torch.multiprocessing.spawn":
                self._child.family.is_code_read = True  # by the program: torch's spawn raises for any that is not 0
        return code

    def _poll(self, flag: int) -> int | None:
        if self._child.ended.triggered:
            self.returncode = self._child.ending.exit_code
        elif self.returncode is None and flag == 0:
            require_task().poll(HostWait("a child process to end"))
            if self._child.ended.triggered:
                self.returncode = self._child.ending.exit_code
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        if timeout == 0:
            return self.poll()
        _wait_for(self._child, timeout)
        return self.poll(1)

    def terminate(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if not self._child.ended.triggered:
            end_child(self._child, number)

    def close(self) -> None:
        """Do nothing: no resource is open."""


def end_child(child: SimProcess, number: signal.Signals) -> None:
    """The program ends a process that it started, or asks it to end where that has a handler."""
    if callable(child.signals.get(number)) and number != signal.SIGKILL:
        child.family.is_code_read = True
        send(child, number)
    elif child.signals.get(number) is not signal.SIG_IGN or number == signal.SIGKILL:
        child.family.ended_by_program = True
        child.world.kill_process(child, number.name, -number)


def _wait_for(child: SimProcess, timeout: float | None) -> None:
    ranks = (child.rank,) if child.is_rank else ()
    wait_for_any([Sentinel(child)], timeout, HostWait("its child processes to end", ranks))


def begin_multiprocessing() -> None:
    """A new process has no children yet."""
    vars(multiprocessing.process).update(_children=set(), _process_counter=itertools.count(1))  # each process's anyway


def end_children(process: SimProcess) -> None:
    """End the daemonic children of a process that ends, and wait for its other children."""
    for child in process.family.children:
        if not child.ended.triggered and child.family.daemonic:
            end_child(child, signal.SIGTERM)
    for child in process.family.children:
        if not child.ended.triggered:
            _wait_for(child, None)


def _popen(real: Callable[..., Any], method: str) -> Any:
    def make(process: Any) -> Any:
        return real(process) if current_task() is None else SimPopen(process, method)

    return staticmethod(make)


def _torch_wrap(real: Callable[..., Any]) -> Callable[..., Any]:
    def wrap(fn: Callable[..., Any], i: int, args: tuple[Any, ...], error_file: str) -> None:
        """torch's own body of a spawned process; what it raises is kept for the report as well."""
        task = current_task()
        if task is None:
            real(fn, i, args, error_file)
            return
        try:
            fn(i, *args)
        except KeyboardInterrupt:
            pass
        except UsageError:
            raise
        except Exception as exc:
            keep_failure(task.process, exc)
            with open(error_file, "wb") as file:
                pickle.dump(task.process.ending.traceback_text, file)
            sys.exit(1)

    wrap.__module__, wrap.__qualname__ = real.__module__, real.__qualname__  # children find it by name
    return wrap


def spawn_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of everything that starts processes or waits for them."""
    context, torch_spawn = multiprocessing.context, sys.modules["torch.multiprocessing.spawn"]
    launch_agent = torch.distributed.launcher.api.launch_agent

    @functools.wraps(launch_agent)
    def launch(*args: Any, **kwargs: Any) -> Any:
        """torchrun's own launcher as a function (accelerate's `notebook_launcher`): its ranks meet only later."""
        if current_task() is not None:
            _start_no_rank()
        return launch_agent(*args, **kwargs)

    patches: list[tuple[Any, str, Any]] = [
        *pipe_patches(),
        (torch_spawn, "_wrap", _torch_wrap(torch_spawn._wrap)),
        (torch.distributed.launcher.api, "launch_agent", launch),
    ]
    for kind in (context.ForkProcess, context.SpawnProcess, context.ForkServerProcess):
        method = kind._start_method
        patches.append((kind, "_Popen", _popen(kind._Popen, method)))
    default = multiprocessing.context.Process
    patches.append((default, "_Popen", _popen_by_default(default._Popen)))
    return patches


def _popen_by_default(real: Callable[..., Any]) -> Any:
    def make(process: Any) -> Any:
        if current_task() is None:
            return real(process)
        method = multiprocessing.get_start_method()
        return SimPopen(process, method)

    return staticmethod(make)
