"""Process numbers of simulated processes, and the signals that they send each other."""

from __future__ import annotations

import _thread
import atexit
import builtins
import functools
import io
import multiprocessing.util
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from distsim.debug.records import Phase
from distsim.debug.records.circumstances import note_handler
from distsim.errors import NotSimulated
from distsim.sim.isolation.for_ranks import for_ranks, patch_for_ranks
from distsim.sim.isolation.io_barrier import note_opened
from distsim.sim.isolation.modules.aliases import ALIASES
from distsim.sim.isolation.modules.patch_table import Patch
from distsim.sim.isolation.process import RankTask, not_ordered, require_task
from distsim.sim.kernel.task import SignalArrived, current_process

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess
    from distsim.sim.kernel.port import RankPort

# -- Process numbers: each simulated process has its own, and everything that shows one shows that one.
#
# They count up from above Linux's largest pid, so no number stands for a simulated process and for one of the
# machine's. `threading.get_ident` stays the machine's: it is the key of `sys._current_frames` and of asynchronous
# exceptions, and each simulated thread is a thread of its own already.

FIRST_PID = 4_194_304
"""Linux's pids are below 2**22 (man 5 proc, pid_max)."""
_AGENT_PID = 2 * FIRST_PID
"""Process id of the launcher (torchrun's agent) on the first node; those of the other nodes follow."""
_THREAD_ID = 4 * FIRST_PID
"""Native ids of threads other than a process's first, whose id is the process's."""


def pid_of(process: SimProcess) -> int:
    return FIRST_PID + process.index


def parent_pid(process: SimProcess) -> int:
    """Return the process id of the parent: a rank's is its node's launcher, and an orphan's is init."""
    if process.family.parent is None:
        return _AGENT_PID + process.slot.host
    return 1 if process.family.parent.ended.triggered else pid_of(process.family.parent)


def process_with(port: RankPort, pid: int) -> SimProcess | None:
    """Return the simulated process *pid*, whether it lives or not."""
    return next((process for process in port.processes if pid_of(process) == pid), None)


def _native_id(task: RankTask) -> int:
    if task is task.process.main_task:
        return pid_of(task.process)
    return _THREAD_ID + task.number


def _own_pid(task: RankTask) -> int:
    return pid_of(task.process)


def _led_by(real: Callable[[int], int], task: RankTask, pid: int, /) -> int:
    """Answer as `os.getpgid` and `os.getsid`: a simulated process leads its own group and session, as under torchrun.

    *real* is the function for real processes.
    """
    if pid and pid < FIRST_PID:
        return real(pid)
    other = task.process if not pid else process_with(task.port, pid)
    if other is None or other.ended.triggered:
        raise ProcessLookupError(3, "No such process")
    return pid_of(other)


_real_getpid = os.getpid
_IN_PROC = re.compile(r"/proc/(\d+)(?=/|$)")
_TELLS_PID = re.compile(r"/proc/(self|\d+)/(stat|status)$")


def _led(path: Any) -> Any:
    """Return *path* with the real pid in place of the running process's simulated pid."""
    if isinstance(path, str) and path.startswith("/proc/"):
        process = current_process()
        match = None if process is None else _IN_PROC.match(path)
        if match is not None and process is not None and match[1] == str(pid_of(process)):
            return f"/proc/{_real_getpid()}{path[match.end() :]}"
    return path


class _Builtin:
    """Replacement of a built-in function. It is an object, because a function would become a method of a class that
    stores it. All are of one class, because programs compare the types of two (`type(print) is type(open)`).
    """

    def __init__(self, real: Callable[..., Any], function: Callable[..., Any]) -> None:
        self._function = function
        functools.update_wrapper(self, real)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _led_to_path(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return *real*, a function of a path, for paths with simulated pids."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return real(_led(args[0]), *args[1:], **kwargs) if args else real(*args, **kwargs)

    return call


def _noted(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return `os.open` or `os.dup`."""
    call = _led_to_path(real)

    def descriptor(*args: Any, **kwargs: Any) -> Any:
        number = call(*args, **kwargs)
        note_opened(number)
        return number

    return descriptor


def _readlink(*args: Any, **kwargs: Any) -> Any:
    process = current_process()
    if process is not None and args and args[0] == "/proc/self":
        return str(pid_of(process))
    return _real_readlink(*args, **kwargs)


def _open(*args: Any, **kwargs: Any) -> Any:
    """Open a file. `/proc/self/stat` and `status` show the simulated process's number."""
    file = _real_open(*args, **kwargs)
    process = current_process()
    if process is not None and args and not isinstance(args[0], int) and file.writable():
        note_opened(file.fileno())
    match = _TELLS_PID.match(args[0]) if process is not None and args and isinstance(args[0], str) else None
    if process is None or match is None or match[1] not in ("self", str(pid_of(process))):
        return file
    with file:
        shown = file.read()
    text = shown if isinstance(shown, str) else shown.decode()
    pid, parent = pid_of(process), parent_pid(process)
    if match[2] == "stat":
        text = re.sub(r"^\d+ (\(.*\) \S) \d+ \d+ \d+", rf"{pid} \1 {parent} {pid} {pid}", text, flags=re.DOTALL)
    else:
        text = re.sub(r"(?m)^(Tgid|Ngid|Pid):\t.*$", rf"\1:\t{pid}", text)
        text = re.sub(r"(?m)^PPid:\t.*$", f"PPid:\t{parent}", text)
    return io.StringIO(text) if isinstance(shown, str) else io.BytesIO(text.encode())


_real_open, _real_readlink = _led_to_path(builtins.open), _led_to_path(os.readlink)


def pid_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for everything that names a process by number."""
    getpid = for_ranks(os.getpid, _own_pid)
    opened = _Builtin(builtins.open, _open)
    finalize: Any = multiprocessing.util.Finalize.__call__
    patches: list[tuple[Any, str, Any]] = [
        patch_for_ranks(os, "getppid", lambda task: parent_pid(task.process)),
        patch_for_ranks(os, "getpgrp", _own_pid),
        patch_for_ranks(os, "getpgid", partial(_led_by, os.getpgid)),
        patch_for_ranks(os, "getsid", partial(_led_by, os.getsid)),
        patch_for_ranks(threading, "get_native_id", _native_id),
        (finalize, "__defaults__", tuple(getpid if d is _real_getpid else d for d in finalize.__defaults__)),
        (builtins, "open", opened),
        (io, "open", opened),
        (builtins, "print", _Builtin(builtins.print, builtins.print)),
        (os, "readlink", _Builtin(os.readlink, _readlink)),
    ]
    patches += [(os, name, _Builtin(getattr(os, name), _noted(getattr(os, name)))) for name in ("open", "dup")]
    for name in ("stat", "lstat", "listdir", "scandir", "access"):
        real = getattr(os, name)
        patches.append((os, name, _Builtin(real, _led_to_path(real))))
    for name, module, _, value in ALIASES.of("getpid"):
        if value is _real_getpid and name != "posix":
            patches.append((module, "getpid", getpid))
    return patches


# -- How a simulated process ends itself, and the signals that processes send each other.

_HARMLESS = frozenset({signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH})
"""Signals that are ignored by default (man 7 signal)."""


def signal_patches() -> list[Patch]:
    """Return patches (holder, attribute, replacement) for exits, exit handlers and signals."""
    return [*_exit_patches(), *_kill_patches(), *_own_signal_patches(), *_handler_patches()]


def _exit_patches() -> list[Patch]:
    """Return the patches for the end of a process and its exit functions."""

    def exit_(task: RankTask, status: int) -> None:
        task.port.end_process(task.process, Phase.EXITED, status)

    def abort(task: RankTask) -> None:
        task.port.end_process(task.process, Phase.KILLED, -signal.SIGABRT, "SIGABRT")

    def register(task: RankTask, function: Any, *args: Any, **kwargs: Any) -> Any:
        task.process.at_exit.append((function, args, kwargs))
        return function

    def unregister(task: RankTask, function: Any) -> None:
        task.process.at_exit[:] = [entry for entry in task.process.at_exit if entry[0] != function]

    return [
        patch_for_ranks(os, "_exit", exit_),
        patch_for_ranks(os, "abort", abort),
        patch_for_ranks(os, "fork", _refused("os.fork", "use multiprocessing.Process")),
        patch_for_ranks(atexit, "register", register),
        patch_for_ranks(atexit, "unregister", unregister),
    ]


def _kill_patches() -> list[Patch]:
    """Return signals that a process sends to a process."""
    real_kill, real_killpg = os.kill, os.killpg

    def kill(task: RankTask, pid: int, signal: int, /) -> None:
        if 0 < pid < FIRST_PID:
            real_kill(pid, signal)
            return
        if pid <= 0:  # a process group: each simulated process leads one of its own
            pid = -pid or pid_of(task.process)
            if pid == 1:
                raise NotSimulated("os.kill(-1, ...)", "name the process that is meant")
        process = process_with(task.port, pid)
        if process is None or not process.alive:
            raise ProcessLookupError(3, "No such process")
        send(process, signal)

    def killpg(task: RankTask, pgid: int, signal: int, /) -> None:
        if 0 < pgid < FIRST_PID:
            real_killpg(pgid, signal)
        else:
            kill(task, -pgid, signal)

    return [patch_for_ranks(os, "kill", kill), patch_for_ranks(os, "killpg", killpg)]


def _own_signal_patches() -> list[Patch]:
    """Return signals that a process sends to itself."""

    def pthread_kill(task: RankTask, thread_id: int, signalnum: int, /) -> None:
        if not any(other.ident == thread_id and not other.finished for other in task.process.tasks):
            raise ProcessLookupError(3, "No such process")
        send(task.process, signalnum)  # Python calls handlers in the main thread, whoever got the signal

    def interrupt_main(task: RankTask, signum: int = signal.SIGINT, /) -> None:
        if callable(handler := _handler(task.process, signum)):
            _in_main_thread(task.process, handler, signum)

    return [
        patch_for_ranks(signal, "pthread_kill", pthread_kill),
        patch_for_ranks(_thread, "interrupt_main", interrupt_main),
        patch_for_ranks(signal, "raise_signal", lambda task, number: send(task.process, number)),
    ]


def _handler_patches() -> list[Patch]:
    """Return the patches for the delivery of signals."""

    def set_signal(task: RankTask, number: Any, handler: Any) -> Any:
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise OSError(22, "Invalid argument")
        before = _handler(task.process, number)
        task.process.signals.handlers[number] = handler
        if callable(handler):
            note_handler(number, handler)
        return before

    def alarm(_: RankTask, seconds: int) -> int:
        if seconds:
            raise NotSimulated("signal.alarm", "use threading.Timer")
        return 0

    return [
        patch_for_ranks(signal, "signal", set_signal),
        patch_for_ranks(signal, "getsignal", lambda task, number: _handler(task.process, number)),
        patch_for_ranks(signal, "alarm", alarm),
        patch_for_ranks(signal, "setitimer", _refused("signal.setitimer", "use threading.Timer")),
        patch_for_ranks(signal, "pause", _refused("signal.pause", "use threading.Event().wait()")),
    ]


_FIRST: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGPIPE: signal.SIG_IGN,
    signal.SIGXFSZ: signal.SIG_IGN,
}
"""Handlers that Python sets at the start of a process."""


def _handler(process: SimProcess, number: int) -> Any:
    return process.signals.handlers.get(number, _FIRST.get(number, signal.SIG_DFL))


def send(process: SimProcess, number: int) -> None:
    """Deliver signal *number* to *process*: call its handler in its main thread, or apply the default action."""
    task = require_task()
    if process is not task.process:
        not_ordered("sends a signal to a process")
    if not number:
        return
    name = signal.Signals(number).name
    handler = _handler(process, number)
    if number not in (signal.SIGKILL, signal.SIGSTOP) and callable(handler):
        _in_main_thread(process, handler, number)
    elif number in (signal.SIGSTOP, signal.SIGTSTP):
        raise NotSimulated(f"stopping a process by {name}", "plant a freeze as a fault instead")
    elif handler is not signal.SIG_IGN and number not in _HARMLESS:
        if process is task.process:
            task.port.end_process(process, Phase.KILLED, -number, name)
        else:
            task.port.kill_process(process, name, -number)


def _in_main_thread(process: SimProcess, handler: Any, number: int) -> None:
    task, main = require_task(), process.main_task
    if task is main:
        handler(number, sys._getframe())
    elif main is not None and not main.finished:
        process.signals.due.append((handler, number))
        main.interrupt(SignalArrived())


def _refused(name: str, remedy: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        raise NotSimulated(name, remedy)

    return refuse
