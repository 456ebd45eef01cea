"""Stops files, sockets, processes and output of a rank that is over.

After a mismatch ranks hold unreduced data. They run to their next wait (Lookahead), and in the end every thread
unwinds through the program's `finally` blocks. On real machines they would be dead. So from then on everything that
a rank has open for writing leads nowhere, and the rank ends at its first attempt to open, remove, connect or start
something.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from distsim.sim.kernel.scheduler import Unwind
from distsim.sim.kernel.task import current_process, current_task
from distsim.torch_compat.device import PY_TORCH_FILE_WRITER

if TYPE_CHECKING:
    from distsim.sim.kernel.port import RankPort

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = frozenset(
    [f"os.{name}" for name in ("chmod", "chown", "exec", "fork", "forkpty", "kill", "killpg", "link", "mkdir")]
    + [f"os.{name}" for name in ("posix_spawn", "remove", "removexattr", "rename", "rmdir", "setxattr", "spawn")]
    + [f"os.{name}" for name in ("startfile", "symlink", "system", "truncate", "utime")]
    + [f"socket.{name}" for name in ("bind", "connect", "sendmsg", "sendto")]
    + ["subprocess.Popen", "sqlite3.connect", "pty.spawn", "signal.pthread_kill"]
)
"""Audit events (docs.python.org/3/library/audit_events.html) of actions that are visible outside the process.

`open` is examined further; `shutil`, `tempfile` and `pathlib` cause these events.
"""
_UNAUDITED = ("write", "pwrite", "writev", "pwritev", "sendfile", "copy_file_range", "splice")
"""Functions of `os` that write without an audit event."""

_depth = [0]
_listening = [False]


def note_opened(number: int) -> None:
    """Note that descriptor *number* was just opened by the calling thread's rank, if it has one.

    This must happen at the opening: the operating system does not say later which thread opened a descriptor, and
    threads of the surrounding program open files of their own during a simulation.
    """
    process = current_process()
    if process is not None:
        with contextlib.suppress(OSError):
            process.port.shared.opened[number] = _identity(number)


def _identity(number: int) -> tuple[int, int]:
    """Return the identity of an open file, because its number is soon reused."""
    state = os.fstat(number)
    return state.st_dev, state.st_ino


def socket_patches() -> list[tuple[Any, str, Any]]:
    """Return (holder, attribute, replacement): sockets that ranks make."""
    real = socket.socket.__init__

    def init(self: socket.socket, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        note_opened(self.fileno())

    return [(socket.socket, "__init__", init)]


@contextlib.contextmanager
def withheld(world: RankPort) -> Iterator[None]:
    """Return a context in which ended ranks of *world* run without external effects."""
    if _depth[0]:
        yield
        return
    if not _listening[0]:  # an audit hook cannot be taken away again: it costs nothing before the first need
        sys.addaudithook(_heard)
        _listening[0] = True
    _lead_nowhere(world)
    names = [name for name in _UNAUDITED if hasattr(os, name)]
    real = [(os, name, getattr(os, name)) for name in names]
    real += PY_TORCH_FILE_WRITER.replaced_by(PY_TORCH_FILE_WRITER.get())  # torch.save opens files in C++
    _depth[0] += 1
    try:
        for holder, name, value in real:
            setattr(holder, name, _ending(value))
        yield
    finally:
        _depth[0] -= 1
        for holder, name, value in real:
            setattr(holder, name, value)


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if not _depth[0] or (event != "open" and event not in _EVENTS):
        return
    if event == "open" and (args[0] == os.devnull or not (args[2] or 0) & _WRITES):
        return
    _end_rank()


def _ending(real: Callable[..., Any]) -> Callable[..., Any]:
    def attempt(*args: Any, **kwargs: Any) -> Any:
        _end_rank()
        return real(*args, **kwargs)

    return attempt


def _end_rank() -> None:
    task = current_task()
    if task is not None:
        if task.doom is None:
            task.doom = Unwind()
        raise task.doom


def _lead_nowhere(world: RankPort) -> None:
    """Redirect files that ranks opened for writing, with their buffers, to nowhere."""
    ours = {s.log_descriptor for p in world.processes for s in (p.stdout, p.stderr) if s is not None}
    for number, identity in world.shared.opened.items():
        if number in ours:
            continue
        with contextlib.suppress(OSError):
            if _identity(number) != identity:  # closed since, and the number is another's
                continue
            kind = os.fstat(number).st_mode
            writes = fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR)
            if writes and (stat.S_ISREG(kind) or (stat.S_ISSOCK(kind) and _reaches_out(number))):
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, number)
                os.close(nowhere)


def _reaches_out(number: int) -> bool:
    """Return whether a socket belongs to a network; a pair within this process only wakes threads."""
    with socket.socket(fileno=os.dup(number)) as same:
        return same.family in (socket.AF_INET, socket.AF_INET6)
