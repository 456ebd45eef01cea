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
from typing import TYPE_CHECKING, Any

from distsim.debug.records import Phase
from distsim.debug.records.circumstances import note_handler
from distsim.errors import NotSimulated
from distsim.sim.isolation.io_barrier import note_opened
from distsim.sim.isolation.modules.aliases import ALIASES
from distsim.sim.isolation.modules.patch_table import Patch
from distsim.sim.isolation.process import current_task, not_ordered, require_task
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


def _native_id(real: Callable[[], int]) -> Callable[[], int]:
    @functools.wraps(real)
    def get_native_id() -> int:
        task = current_task()
        if task is None:
            return real()
        if task is task.process.main_task:
            return pid_of(task.process)
        return _THREAD_ID + task.number

    return get_native_id


def _per_process(real: Callable[..., Any], own: Callable[[SimProcess], Any]) -> Callable[..., Any]:
    """Return a function without arguments that returns the result of *own* inside a rank."""

    @functools.wraps(real)
    def ask() -> Any:
        process = current_process()
        return real() if process is None else own(process)

    return ask


def _of_pid(real: Callable[[int], int]) -> Callable[[int], int]:
    """Return `os.getpgid` or `os.getsid` for simulated processes, each of which leads its own group and session, as
    under torchrun.
    """

    @functools.wraps(real)
    def ask(pid: int, /) -> int:
        process = current_process()
        if process is None or (pid and pid < FIRST_PID):
            return real(pid)
        other = process if not pid else process_with(process.port, pid)
        if other is None or other.ended.triggered:
            raise ProcessLookupError(3, "No such process")
        return pid_of(other)

    return ask


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
    getpid = _per_process(os.getpid, pid_of)
    native = _native_id(threading.get_native_id)
    opened = _Builtin(builtins.open, _open)
    finalize: Any = multiprocessing.util.Finalize.__call__
    patches: list[tuple[Any, str, Any]] = [
        (os, "getppid", _per_process(os.getppid, parent_pid)),
        (os, "getpgrp", _per_process(os.getpgrp, pid_of)),
        (os, "getpgid", _of_pid(os.getpgid)),
        (os, "getsid", _of_pid(os.getsid)),
        (threading, "get_native_id", native),
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
    real_exit, real_register, real_unregister = os._exit, atexit.register, atexit.unregister

    def exit_(status: int) -> None:
        task = current_task()
        if task is None:
            real_exit(status)
        else:
            task.port.end_process(task.process, Phase.EXITED, status)

    def abort() -> None:
        task = require_task()
        task.port.end_process(task.process, Phase.KILLED, -signal.SIGABRT, "SIGABRT")

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
        (os, "fork", _refused("os.fork", os.fork, "use multiprocessing.Process")),
        (atexit, "register", register),
        (atexit, "unregister", unregister),
    ]


def _kill_patches() -> list[Patch]:
    """Return signals that a process sends to a process."""
    real_kill, real_killpg = os.kill, os.killpg

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
        process = process_with(task.port, pid)
        if process is None or not process.alive:
            raise ProcessLookupError(3, "No such process")
        send(process, signal)

    @functools.wraps(real_killpg)
    def killpg(pgid: int, signal: int, /) -> None:
        if current_task() is None or 0 < pgid < FIRST_PID:
            real_killpg(pgid, signal)
        else:
            kill(-pgid, signal)

    return [(os, "kill", kill), (os, "killpg", killpg)]


def _own_signal_patches() -> list[Patch]:
    """Return signals that a process sends to itself."""
    real_pthread_kill, real_interrupt, real_raise = signal.pthread_kill, _thread.interrupt_main, signal.raise_signal

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
        elif callable(handler := signal.getsignal(signum)):
            _in_main_thread(task.process, handler, signum)

    def raise_signal(number: int) -> None:
        if current_task() is None:
            real_raise(number)
        else:
            send(require_task().process, number)

    return [
        (signal, "pthread_kill", pthread_kill),
        (_thread, "interrupt_main", interrupt_main),
        (signal, "raise_signal", raise_signal),
    ]


def _handler_patches() -> list[Patch]:
    """Return the patches for the delivery of signals."""
    real_signal, real_getsignal = signal.signal, signal.getsignal

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
        process.signals.handlers[number] = handler
        if callable(handler):
            note_handler(number, handler)
        return before

    return [
        (signal, "signal", set_signal),
        (signal, "getsignal", getsignal),
        (signal, "alarm", _alarm(signal.alarm)),
        (signal, "setitimer", _refused("signal.setitimer", signal.setitimer, "use threading.Timer")),
        (signal, "pause", _refused("signal.pause", signal.pause, "use threading.Event().wait()")),
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
