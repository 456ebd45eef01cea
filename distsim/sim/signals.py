"""How a simulated process ends itself, and the signals it sends itself."""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable
from typing import Any

from distsim.debug.records import Phase
from distsim.errors import NotSimulated
from distsim.sim.pids import FIRST_PID, pid_of, process_with
from distsim.sim.task import current_process, current_task, require_task

__all__ = ["signal_patches"]

_HARMLESS = frozenset({signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH})
"""Signals whose default is to do nothing (man 7 signal)."""

Patch = tuple[Any, str, Any]


def signal_patches() -> list[Patch]:
    """(holder, attribute, replacement) of exits, signals and exit handlers."""
    real_exit, real_kill, real_signal, real_getsignal = os._exit, os.kill, signal.signal, signal.getsignal
    real_raise, real_register, real_unregister = signal.raise_signal, atexit.register, atexit.unregister

    def exit_(status: int) -> None:
        task = current_task()
        if task is None:
            real_exit(status)
        else:
            task.world.end_process(task.process, Phase.EXITED, status)

    def abort() -> None:
        task = require_task()
        task.world.end_process(task.process, Phase.KILLED, -signal.SIGABRT, "SIGABRT")

    def kill(pid: int, number: int) -> None:
        task = current_task()
        if task is not None and pid == pid_of(task.process):
            _deliver(number)
        elif task is not None and pid >= FIRST_PID:
            child = process_with(task.world, pid)
            if child is None or not child.alive:
                raise ProcessLookupError(3, "No such process")
            if number:
                task.world.kill_process(child, signal.Signals(number).name, -number)
        else:
            real_kill(pid, number)

    def raise_signal(number: int) -> None:
        if current_task() is None:
            real_raise(number)
        else:
            _deliver(number)

    def getsignal(number: int) -> Any:
        process = current_process()
        if process is None or number not in process.signals:
            return real_getsignal(number)
        return process.signals[number]

    def set_signal(number: Any, handler: Any) -> Any:
        process = current_process()
        if process is None:
            return real_signal(number, handler)
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise OSError(22, "Invalid argument")
        before = getsignal(number)
        process.signals[number] = handler
        return before

    def register(function: Any, *args: Any, **kwargs: Any) -> Any:
        process = current_process()
        if process is None:
            return real_register(function, *args, **kwargs)
        process.at_exit.append((function, args, kwargs))
        return function

    def unregister(function: Any) -> None:
        process = current_process()
        if process is None:
            real_unregister(function)
        else:
            process.at_exit[:] = [entry for entry in process.at_exit if entry[0] != function]

    return [
        (os, "_exit", exit_),
        (os, "abort", abort),
        (os, "kill", kill),
        (os, "fork", _refused("os.fork", os.fork, "use multiprocessing.Process")),
        (signal, "signal", set_signal),
        (signal, "getsignal", getsignal),
        (signal, "raise_signal", raise_signal),
        (signal, "alarm", _alarm(signal.alarm)),
        (signal, "setitimer", _refused("signal.setitimer", signal.setitimer, "use threading.Timer")),
        (signal, "pause", _refused("signal.pause", signal.pause, "use threading.Event().wait()")),
        (atexit, "register", register),
        (atexit, "unregister", unregister),
    ]


def _deliver(number: int) -> None:
    """Signal *number* reaches the running process: its handler, or the default."""
    task = require_task()
    process = task.process
    if not number:
        return
    name = signal.Signals(number).name
    handler = process.signals.get(number, signal.SIG_DFL)
    if number not in (signal.SIGKILL, signal.SIGSTOP) and callable(handler):
        handler(number, None)
    elif number == signal.SIGINT and handler is signal.SIG_DFL and number not in process.signals:
        raise KeyboardInterrupt
    elif number in (signal.SIGSTOP, signal.SIGTSTP):
        raise NotSimulated(f"stopping a process by {name}", "plant a freeze as a fault instead")
    elif handler is not signal.SIG_IGN and number not in _HARMLESS:
        task.world.end_process(process, Phase.KILLED, -number, name)


def _refused(name: str, real: Callable[..., Any], remedy: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if current_task() is None:
            return real(*args)
        raise NotSimulated(name, remedy)

    return call


def _alarm(real: Callable[[int], int]) -> Callable[[int], int]:
    def alarm(seconds: int) -> int:
        if current_task() is None:
            return real(seconds)
        if seconds:
            raise NotSimulated("signal.alarm", "use threading.Timer")
        return 0

    return alarm
