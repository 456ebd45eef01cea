"""The folder of a run's rings: who may have it, what an earlier run left there, and how long that stays."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from pathlib import Path

from distsim.debug.evidence.procfs import look
from distsim.debug.report.rank_states import MARKER
from distsim.errors import UsageError

__all__ = ["clear", "forget_old_runs", "refuse_company"]

KEPT_RUNS = 32
"""Folders of failed runs that stay for `distsim diagnose`: a rank's ring takes 2 MiB of /dev/shm."""


def refuse_company(directory: Path) -> None:
    """Two jobs at once in one folder would read each other's rings."""
    pid = _living_launcher(directory)
    if pid is not None and pid != os.getpid():
        raise UsageError(f"--rings {directory}: a job that still runs (pid {pid}) writes there; choose another")


def _living_launcher(directory: Path) -> int | None:
    """The launcher that wrote into a folder, if it still runs on this host."""
    try:
        said = json.loads((directory / "launcher.json").read_text())
        pid, start = int(said["pid"]), int(said["start"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if said.get("host") == platform.node() and look(pid, start) is not None else None


def forget_old_runs(base: Path, keep: int = KEPT_RUNS) -> None:
    """Remove what all but the last failed runs have left in memory; what still runs stays."""
    with contextlib.suppress(OSError):  # another launcher does the same
        runs = sorted(base.glob("run-*"), key=lambda path: path.stat().st_mtime, reverse=True)
        for directory in runs[keep:]:
            if _living_launcher(directory) is None:
                shutil.rmtree(directory, ignore_errors=True)


def clear(directory: Path) -> None:
    """What an earlier run left: its rings would be taken for ranks of this one."""
    for pattern in (
        "rank*.ring",
        "rank*.stacks",
        "rank*.silent",
        "exit.*.json",
        "forked.*.json",
        "monitor*",
        "verdict.*.json",
        "ask.*",
        "answer.*",
        "stacks.txt",
        "*.new",
    ):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)
    for name in ("done.json", "verdict.json", "aborted.json", "launcher.json", "lead.json", "follow.json", MARKER):
        (directory / name).unlink(missing_ok=True)
