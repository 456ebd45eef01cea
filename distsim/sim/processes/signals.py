"""How a simulated process ends itself, and the signals that processes send each other."""

from __future__ import annotations

import _thread
import atexit
import functools
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distsim.debug.records import Phase
from distsim.errors import NotSimulated
from distsim.sim.isolation.process import current_process, current_task, require_task
from distsim.sim.kernel.task import SignalArrived
from distsim.sim.processes.pids import FIRST_PID, pid_of, process_with

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess

__all__ = ["send", "signal_patches"]

_HARMLESS = frozenset({signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH})
"""Signals whose default is to do nothing (man 7 signal)."""

Patch = tuple[Any, str, Any]


def signal_patches() -> list[Patch]:
    """(holder, attribute, replacement) of exits, signals and exit handlers."""
    real_exit, real_kill, real_signal, real_getsignal = os._exit, os.kill, signal.signal, signal.getsignal
    real_killpg, real_pthread_kill, real_interrupt = os.killpg, signal.pthread_kill, _thread.interrupt_main
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

    @functools.wraps(real_kill)
    def kill(pid: int, signal: int, /) -> None:
        task = current_task()
        if task is None or 0 < pid < FIRST_PID:
            real_kill(pid, signal)
            return
        if pid <= 0:  # a process group: each simulated process leads one of its own
            pid = -pid or pid_of(task.process)
            if pid == 1:
                raise NotSimulated("os.kill(-1, ...)", "name the process that is meant")
        process = process_with(task.world, pid)
        if process is None or not process.alive:
            raise ProcessLookupError(3, "No such process")
        send(process, signal)

    @functools.wraps(real_killpg)
    def killpg(pgid: int, signal: int, /) -> None:
        if current_task() is None or 0 < pgid < FIRST_PID:
            real_killpg(pgid, signal)
        else:
            kill(-pgid, signal)

    @functools.wraps(real_pthread_kill)
    def pthread_kill(thread_id: int, signalnum: int, /) -> None:
        task = current_task()
        if task is None:
            real_pthread_kill(thread_id, signalnum)
        elif not any(other.ident == thread_id and not other.finished for other in task.process.tasks):
            raise ProcessLookupError(3, "No such process")
        else:
            send(task.process, signalnum)  # Python calls handlers in the main thread, whoever got the signal

    @functools.wraps(real_interrupt)
    def interrupt_main(signum: int = signal.SIGINT, /) -> None:
        task = current_task()
        if task is None:
            real_interrupt(signal.Signals(signum))
        elif callable(handler := getsignal(signum)):
            _in_main_thread(task.process, handler, signum)

    def raise_signal(number: int) -> None:
        if current_task() is None:
            real_raise(number)
        else:
            send(require_task().process, number)

    def getsignal(number: int) -> Any:
        process = current_process()
        return real_getsignal(number) if process is None else _handler(process, number)

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
        (os, "killpg", killpg),
        (signal, "pthread_kill", pthread_kill),
        (_thread, "interrupt_main", interrupt_main),
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


_FIRST: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGPIPE: signal.SIG_IGN,
    signal.SIGXFSZ: signal.SIG_IGN,
}
"""What Python sets when a process begins."""


def _handler(process: SimProcess, number: int) -> Any:
    return process.signals.get(number, _FIRST.get(number, signal.SIG_DFL))


def send(process: SimProcess, number: int) -> None:
    """Signal *number* reaches *process*: its handler is called in its main thread, or the default happens."""
    if not number:
        return
    task = require_task()
    name = signal.Signals(number).name
    handler = _handler(process, number)
    if number not in (signal.SIGKILL, signal.SIGSTOP) and callable(handler):
        _in_main_thread(process, handler, number)
    elif number in (signal.SIGSTOP, signal.SIGTSTP):
        raise NotSimulated(f"stopping a process by {name}", "plant a freeze as a fault instead")
    elif handler is not signal.SIG_IGN and number not in _HARMLESS:
        if process is task.process:
            task.world.end_process(process, Phase.KILLED, -number, name)
        else:
            task.world.kill_process(process, name, -number)


def _in_main_thread(process: SimProcess, handler: Any, number: int) -> None:
    task, main = require_task(), process.main_task
    if task is main:
        handler(number, None)
    elif main is not None and not main.finished:
        process.signals_due.append((handler, number))
        main.interrupt(SignalArrived())


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
