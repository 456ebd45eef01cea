"""What a launcher says last, when all that the ranks have said is above it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from distsim.debug.monitor.start import gone_text
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.report.console import piped_width
from distsim.debug.report.render import render_diagnoses

__all__ = ["failure_line", "say_if_killed", "verdict_line"]


def verdict_line(verdict: Mapping[str, Any]) -> str:
    """The first line of the report that the monitor has printed; nothing where nothing was wrong."""
    diagnoses = [Diagnosis.from_json(found) for found in verdict.get("diagnoses", ())]
    if not diagnoses:
        return ""
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else piped_width(120)
    return render_diagnoses(diagnoses[:1]).plain(width).partition("\n")[0] + "\n"


def failure_line(error: ChildFailedError) -> str:
    """Who failed first, as torch elastic tells it."""
    rank, failure = error.get_first_failure()
    how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return f"distsim: rank {rank} failed first ({how}, pid {failure.pid})\n"


def say_if_killed(monitor: subprocess.Popen[bytes], over: threading.Event) -> None:
    """Wait for a monitor; that one is gone before the job is *over* is told at once. Any other has said why it ends."""
    monitor.wait()
    if monitor.returncode < 0 and not over.is_set():
        print(gone_text(monitor.pid, monitor.returncode), file=sys.stderr, flush=True)
