"""The life of a simulated process: its program, its end, and the end of its children."""

from __future__ import annotations

import importlib
import itertools
import logging
import multiprocessing.process
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from distsim.debug.records import HostWait, Phase
from distsim.debug.records.frames import raised_at
from distsim.errors import UsageError
from distsim.sim.c10d.stores import close_files
from distsim.sim.isolation.modules.modules import is_own_file
from distsim.sim.isolation.modules.own_code import own_code
from distsim.sim.isolation.process import SimProcess, not_ordered, require_task
from distsim.sim.isolation.wraps import keep_failure
from distsim.sim.kernel.scheduler import Unwind
from distsim.sim.kernel.task import Killed
from distsim.sim.orders.processes import take_turn_to_end, wait_for_any
from distsim.sim.processes.ipc import Sentinel
from distsim.sim.processes.signals import pid_of, send
from distsim.sim.processes.threads import close_pools, thread_of


class Program:
    """The user's script or module, compiled once for all ranks."""

    def __init__(self, path: str, module: str | None = None, spec: Any = None) -> None:
        self.path = path
        self.module = module
        self.spec = spec
        self._code: CodeType | None = None

    def code(self) -> CodeType:
        if self._code is None:
            if self.spec is not None:
                loader = self.spec.loader
                is_source = type(loader) is SourceFileLoader and is_own_file(loader.path)
                code = own_code(loader.get_data(loader.path), loader.path) if is_source else None
                self._code = code or loader.get_code(self.spec.name)
                assert self._code is not None
            else:
                self._code = own_code(Path(self.path).read_bytes(), self.path)
        return self._code

    def run_in(self, process: SimProcess, name: str) -> ModuleType:
        """Execute as *name* (`__main__`, or `__mp_main__` in a spawned child) in *process*."""
        main = ModuleType(name)
        main.__file__ = self.path
        main.__dict__["__builtins__"] = __builtins__
        if self.spec is not None:
            main.__package__ = self.spec.parent
            main.__spec__ = self.spec
            if self.spec.parent:
                importlib.import_module(self.spec.parent)
        else:
            main.__dict__["__cached__"] = None
        process.interpreter.main = main
        sys.modules["__main__"] = main
        sys.modules["__mp_main__"] = main  # multiprocessing's name of it, in every process
        exec(self.code(), main.__dict__)
        return main


def live(process: SimProcess, program: Callable[[], Any]) -> None:
    """Run *program* in a process's main thread, then end the process as Python does."""
    try:
        with thread_of(process):
            _live(process, program)
    finally:  # `threading.enumerate()` of the surrounding program knows it no longer
        threading._active.pop(threading.get_ident(), None)  # type: ignore[attr-defined]


def _live(process: SimProcess, program: Callable[[], Any]) -> None:
    task = require_task()
    # multiprocessing's list of children and their numbers are each process's own.
    vars(multiprocessing.process).update(_children=set(), _process_counter=itertools.count(1))
    phase, code = Phase.FINISHED, 0
    try:
        process.ending.result = program()
        process.ending.through = True
        task.flush()
    except Unwind as end:
        if isinstance(end, Killed):
            return
        phase = Phase.RUNNING
    except SystemExit as exit_:
        phase, code = Phase.EXITED, _exit_code(exit_, process)
        if process.ending.exception is not None:  # a spawned rank: torch has turned it into an exit code
            phase = Phase.RAISED
    except UsageError:
        raise
    except BaseException as exc:
        phase, code = Phase.RAISED, 1
        keep_failure(process, exc)
        repeats = any(child.ending.exception is not None for child in process.family.children)
        if process is process.port.launcher and process.stderr is not None and not repeats:
            process.stderr.write(process.ending.traceback_text or "")  # no report on the ranks would show it
    if phase is Phase.RUNNING:
        return
    try:
        _finalize(process, phase)
    except Unwind:
        return
    except BaseException as exc:
        if process.ending.exception is None:
            phase, code = Phase.RAISED, 1
            keep_failure(process, exc)
    if process.port.facts.turns is not None:
        take_turn_to_end(process.port.facts.turns, task)
    process.phase, process.ending.exit_code = phase, code
    process.ending.end_s = task.now_s()


def _finalize(process: SimProcess, phase: Phase) -> None:
    """Run the steps between the end of a program and the end of its process, as Python does."""
    task = require_task()
    if phase is not Phase.RAISED:
        _join_threads(process)
    while process.at_exit:
        function, args, kwargs = process.at_exit.pop()
        function(*args, **kwargs)
    _end_children(process)
    close_files(process)
    if phase is not Phase.RAISED:
        for group in process.groups.objects:
            group.finish(task)
    logging.shutdown()
    task.flush()
    if phase is not Phase.RAISED and process.accelerators is not None:
        for device in process.accelerators.devices:
            device.finish(task)


def _exit_code(exit_: SystemExit, process: SimProcess) -> int:
    if process.ending.exception is None:
        process.last_stack = raised_at(exit_.__traceback__)
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code
    if process.stderr is not None:
        process.stderr.write(f"{exit_.code}\n")
    return 1


def _join_threads(process: SimProcess) -> None:
    """Wait for the process's non-daemon threads, as Python does at its end."""
    task = require_task()
    close_pools(process.tasks)
    for other in list(process.tasks):
        if other is not task and not other.daemon and not other.finished:
            task.wait(other.done, HostWait(f"thread {other.name!r} to end"))


def module_spec(name: str) -> ModuleSpec | None:
    """Find the module of `-m name` without an import, because each rank imports its own packages."""
    path = [os.getcwd(), *sys.path]
    spec, parts = None, name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    if spec is not None and spec.submodule_search_locations is not None:
        return PathFinder.find_spec(name + ".__main__", path)
    return spec


# -- Children of a process.


class ChildProcess:
    """A simulated process as its parent sees it."""

    def __init__(self, child: SimProcess) -> None:
        self._child = child
        self.pid = pid_of(child)
        self.sentinel = Sentinel(child)
        self.returncode: int | None = None

    def poll_quietly(self, flag: int = 0) -> int | None:
        if self.returncode is None and flag == 0:
            wait_for_any([self.sentinel], 0.0, HostWait("a child process to end"), "look at a process")
        if self._child.ended.triggered:
            self.returncode = self._child.ending.exit_code
        return self.returncode

    def wait_for_end(self, timeout: float | None) -> None:
        ranks = (self._child.rank,) if self._child.is_rank else ()
        wait_for_any([self.sentinel], timeout, HostWait("its child processes to end", ranks))


def end_child(child: SimProcess, number: signal.Signals) -> None:
    """End a process that the program started, or call the process's own handler of the signal."""
    not_ordered("ends a process")
    if callable(child.signals.handlers.get(number)) and number != signal.SIGKILL:
        child.family.is_code_read = True
        send(child, number)
    elif child.signals.handlers.get(number) is not signal.SIG_IGN or number == signal.SIGKILL:
        child.family.ended_by_program = True
        child.port.kill_process(child, number.name, -number)


def _end_children(process: SimProcess) -> None:
    """End the daemonic children of a process that ends, and wait for its other children."""
    turns = process.port.facts.turns
    for child in process.family.children:
        if turns is not None and child.family.daemonic and not child.family.is_noticed:
            turns.trace.unexplored["ends while a daemonic process of its own may still run"] = None
        if not child.ended.triggered and child.family.daemonic:
            end_child(child, signal.SIGTERM)
    for child in process.family.children:
        if not child.ended.triggered:
            ChildProcess(child).wait_for_end(None)
