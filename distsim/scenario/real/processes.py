"""Processes and all that they have started: how a run ends that does not end by itself."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

__all__ = ["descendants", "end"]


def end(pids: Iterable[int]) -> None:
    """Kill *pids* and their descendants at once.

    They are stopped first: processes that are killed one by one could start others in between, or report the death of
    the others.
    """
    roots = list(pids)
    known: dict[int, None] = {}
    while more := [pid for pid in descendants(roots) if pid not in known]:
        for pid in more:
            known[pid] = None
            _send(pid, signal.SIGSTOP)
    for pid in known:
        _send(pid, signal.SIGKILL)


def descendants(pids: Iterable[int]) -> list[int]:
    """*pids*, and the children of all of them, as /proc has them at this moment."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue  # it has ended
        children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    result = list(pids)
    for pid in result:
        result += children.get(pid, ())
    return result


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
