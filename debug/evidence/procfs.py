"""Reads /proc about processes that cannot report their state themselves."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["SystemProcess", "Work", "look", "own_process", "signal_name", "work_of"]


@dataclass(frozen=True)
class SystemProcess:
    """One process at one moment."""

    state: str
    """R, S, D, T (stopped), t (traced), Z (dead, not yet reaped)."""
    start_ticks: int
    wait_status: int | None
    """For a zombie: its end, as os.waitpid returns it; None if the kernel does not say."""

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of a zombie, negative for a signal."""
        if self.state != "Z" or self.wait_status is None:
            return None
        return os.waitstatus_to_exitcode(self.wait_status)


def look(pid: int, start_ticks: int = 0) -> SystemProcess | None:
    """Return the process; None if it is gone, or if its number now belongs to another process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    words = text.rpartition(")")[2].split()
    start = int(words[19])
    if start_ticks and start != start_ticks:
        return None
    # Field 52, exit_code, is 0 for readers without ptrace rights as well; as a zombie's it is taken at its word.
    status = int(words[49]) if len(words) > 49 else None
    return SystemProcess(words[0], start, status)


def own_process() -> dict[str, Any]:
    """Return whether the process is the one in `launcher.json`, because a number alone may be reused."""
    process = look(os.getpid())
    return {"pid": os.getpid(), "host": platform.node(), "start": process.start_ticks if process else 0}


def signal_name(number: int) -> str:
    """`SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Work:
    """Work of a process and its children so far."""

    cpu_s: float
    transferred: int
    """Bytes read and written by system calls."""
    main_cpu_s: float = 0.0
    """CPU time of the main thread alone."""


def work_of(pid: int) -> Work:
    """The work of a process tree so far; of children that have ended as far as they were waited for."""
    cpu_ticks = transferred = main_ticks = 0
    pids = [pid]
    with contextlib.suppress(OSError, ValueError, IndexError):
        main_ticks = sum(map(int, Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    while pids:
        each = pids.pop()
        try:
            words = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            cpu_ticks += sum(int(word) for word in words[11:15])  # utime, stime and of children that were waited for
            for task in Path(f"/proc/{each}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
            io = Path(f"/proc/{each}/io").read_text().split()
            transferred += int(io[1]) + int(io[3])  # rchar, wchar
        except (OSError, ValueError, IndexError):
            continue
    a_second = os.sysconf("SC_CLK_TCK")
    return Work(cpu_ticks / a_second, transferred, main_ticks / a_second)
