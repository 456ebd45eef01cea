"""Undoes what ranks wrote to disk if their run has to start again.

A restarted run executes the program a second time, so the effects of the first execution would appear twice. New
files and folders are removed, and files that were appended to are truncated. After any other effect (a file
overwritten, renamed or removed, a connection, a started program) nothing is undone and the run does not restart.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from distsim.sim.kernel.task import current_task

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FINAL = frozenset(
    [f"os.{name}" for name in ("chmod", "chown", "exec", "fork", "forkpty", "link", "posix_spawn", "setxattr")]
    + [f"os.{name}" for name in ("removexattr", "spawn", "startfile", "symlink", "system", "truncate")]
    + ["socket.connect", "socket.sendto", "sqlite3.connect", "pty.spawn"]
)
"""Audit events of actions that cannot be undone. Whether removing and renaming can be undone depends on the file."""
_REPEATABLE = ("c++", "cc", "g++", "gcc", "git", "hostname", "ldconfig", "lscpu", "make", "ninja", "nvcc", "nvidia-smi")
"""Programs that may run twice: they look, or build what is then there. Megatron-LM's rank 0 runs make."""
_CACHE = "__pycache__"

_open_logs: list[UndoLog] = []
_is_listening = False


class UndoLog:
    """The effects on files that ranks had from `open` to `close`."""

    def __init__(self) -> None:
        self.is_complete = True
        """Whether all effects so far can be undone."""
        self._made: list[str] = []
        self._sizes: dict[str, int] = {}

    def open(self) -> None:
        """Start to log effects of ranks."""
        global _is_listening
        if not _is_listening:  # an audit hook cannot be removed again
            sys.addaudithook(_on_event)
            _is_listening = True
        _open_logs.append(self)

    def close(self) -> None:
        """Stop logging."""
        if self in _open_logs:
            _open_logs.remove(self)

    def undo(self) -> None:
        """Undo everything."""
        self.close()
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                if os.path.isdir(path) and not os.path.islink(path):
                    os.rmdir(path)
                else:
                    os.remove(path)
        for path, size in self._sizes.items():
            with contextlib.suppress(OSError):
                os.truncate(path, size)

    def on_event(self, event: str, args: tuple[Any, ...]) -> None:
        """Note an audit event of a rank."""
        if event == "open":
            if (args[2] or 0) & _WRITES:
                self.opens(args[0], args[2])
        elif event == "os.mkdir":
            self._makes(args[0])
        elif event in ("os.remove", "os.rmdir"):
            path = _path(args[0])
            if path in self._made:
                self._made.remove(path)
            else:
                self.is_complete = False
        elif event == "os.rename":
            self._renames(_path(args[0]), _path(args[1]))
        elif event == "subprocess.Popen":
            program = args[1][0] if not isinstance(args[1], str | bytes) else args[1].split()[0]
            self.is_complete = self.is_complete and os.path.basename(os.fsdecode(program)) in _REPEATABLE
        elif event in _FINAL:
            self.is_complete = False

    def opens(self, target: Any, flags: int) -> None:
        """Note that a file is opened for writing. A number is the descriptor of a file that is already open."""
        if isinstance(target, int) or target is None:
            return
        path = _path(target)
        if path in self._made or path in self._sizes or _CACHE in path or path.startswith("/dev/"):
            return
        try:
            size = os.path.getsize(path)
        except OSError:
            self._made.append(path)
            return
        if flags & os.O_APPEND:
            self._sizes[path] = size
        else:
            self.is_complete = self.is_complete and not size

    def _makes(self, target: Any) -> None:
        path = _path(target)
        if not os.path.exists(path):
            self._made.append(path)

    def _renames(self, source: str, target: str) -> None:
        if _CACHE in target:
            return
        if source not in self._made or (os.path.exists(target) and target not in self._made):
            self.is_complete = False
            return
        self._made.remove(source)
        if target not in self._made:
            self._made.append(target)


def _path(target: Any) -> str:
    return os.path.abspath(os.fsdecode(target))


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if _open_logs and (event == "open" or event.startswith(("os.", "so", "su", "sq", "pty"))):
        if current_task() is not None:
            with contextlib.suppress(TypeError, ValueError, IndexError):
                _open_logs[-1].on_event(event, args)
