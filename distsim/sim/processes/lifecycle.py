"""The life of a simulated process: its threads are made ready, its program runs, it ends."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from distsim.debug.records import HostWait, Phase
from distsim.debug.records.frames import raised_at
from distsim.errors import UsageError
from distsim.sim.c10d.stores import close_files
from distsim.sim.isolation.modules.modules import is_own_file
from distsim.sim.isolation.modules.own_code import own_code
from distsim.sim.isolation.process import SimProcess, require_task
from distsim.sim.isolation.wraps import keep_failure
from distsim.sim.kernel.scheduler import Unwind
from distsim.sim.kernel.task import Killed
from distsim.sim.processes.spawn import begin_multiprocessing, end_children
from distsim.sim.processes.threads import close_pools, thread_of

__all__ = ["Program", "live"]


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
        process.main = main
        sys.modules["__main__"] = main
        sys.modules["__mp_main__"] = main  # multiprocessing's name of it, in every process
        exec(self.code(), main.__dict__)
        return main


def live(process: SimProcess, program: Callable[[], Any]) -> None:
    """Body of a process's main thread: run *program*, then end as a Python process ends."""
    try:
        with thread_of(process):
            _live(process, program)
    finally:  # `threading.enumerate()` of the surrounding program knows it no longer
        threading._active.pop(threading.get_ident(), None)  # type: ignore[attr-defined]


def _live(process: SimProcess, program: Callable[[], Any]) -> None:
    task = require_task()
    begin_multiprocessing()
    phase, code = Phase.FINISHED, 0
    try:
        process.ending.result = program()
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
        if process is process.world.launcher and process.stderr is not None and not repeats:
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
    process.phase, process.ending.exit_code = phase, code
    process.ending.end_s = task.now_s()


def _finalize(process: SimProcess, phase: Phase) -> None:
    """Run what Python does between the end of the program and the end of its process."""
    task = require_task()
    if phase is not Phase.RAISED:
        _join_threads(process)
    while process.at_exit:
        function, args, kwargs = process.at_exit.pop()
        function(*args, **kwargs)
    end_children(process)
    close_files(process)
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
    """A process lives until its non-daemon threads have ended."""
    task = require_task()
    close_pools(process.tasks)
    for other in list(process.tasks):
        if other is not task and not other.daemon and not other.finished:
            task.wait(other.done, HostWait(f"thread {other.name!r} to end"))
