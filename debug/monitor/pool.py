"""`python -m distsim.debug.monitor --series`: one monitor process for the many short jobs of a test run.

A line in says which job comes, `{"directory": ..., "environment": {...}}`; a line out says that it is over. It ends
with its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO

from distsim.debug.monitor.start import importable
from distsim.debug.monitor.steady import Steady
from distsim.debug.rings.files import create_private
from distsim.debug.settings import Settings

__all__ = ["Series", "watch_series"]


def watch_series(orders: IO[str], answers: IO[str]) -> None:
    """Watch each job that *orders* name, to its end. What a monitor says is in the job's `monitor.log`."""
    for order in orders:
        job = json.loads(order)
        directory = Path(job["directory"])
        with contextlib.suppress(OSError), open(directory / "monitor.log", "ab") as log:
            os.dup2(log.fileno(), 2)
        settings = Settings.read(environ=job["environment"])
        if settings.events == "-":  # standard output is for the answers
            settings = replace(settings, events="")
        Steady(directory, settings, None).run()
        print("over", file=answers, flush=True)


class Series:
    """The monitor of a whole test run, from where its jobs are started: begun with the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def begin(self, directory: Path, settings: Settings) -> None:
        """Have the job in *directory* watched."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "distsim.debug.monitor", "--series"],
                env=importable(dict(os.environ), Path(__file__).resolve()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        with contextlib.suppress(OSError), os.fdopen(create_private(directory / "monitor..lock"), "w") as lock:
            lock.write(str(self._process.pid))
        order = {"directory": str(directory), "environment": settings.environment()}
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed: the job goes on without
            print(json.dumps(order), file=self._process.stdin, flush=True)

    def wait(self, timeout_s: float) -> None:
        """Until the job is over for its monitor. One that does not come to its end is ended."""
        if self._process is None or self._process.stdout is None:
            return
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready or not self._process.stdout.readline():
            self.end(kill=True)

    def end(self, *, kill: bool = False) -> None:
        """No job comes any more."""
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
            return
        process.kill()
        process.wait()
