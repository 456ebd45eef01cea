"""The monitor as a process: it outlives its own faults, for one job or for many.

`python -m distsim.debug.monitor --series` is one process for the many short jobs of a test run. A line in says which
job comes, `{"directory": ..., "environment": {...}}`; a line out says that it is over. It ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import IO

from distsim.debug.monitor.loop import Monitor
from distsim.debug.monitor.start import importable
from distsim.debug.rings.files import append_private, create_private
from distsim.debug.settings import Settings

__all__ = ["MOST_FAULTS", "Series", "Steady", "watch_series"]

MOST_FAULTS = 50
"""Number of consecutive faults of its own, at five a second, after which a monitor gives up."""


class GaveUp(Exception):
    """Raised when the monitor loop failed `MOST_FAULTS` times in a row."""


class Steady(Monitor):
    """A monitor that survives faults of its own: it logs them and continues.

    If it cannot continue, it leaves the rings and reports that nothing is known about the job, which is then not
    called healthy.
    """

    faults = 0
    """Number of consecutive faults; a turn without one resets it."""
    _said_fault = False

    def run(self) -> int:
        try:
            return super().run()
        except Exception as error:
            if not isinstance(error, GaveUp):  # in the farewell
                self._note_fault()
            self._give_up()
            return self.report.exit_code

    def _turn(self) -> bool:
        try:
            over = super()._turn()
        except Exception as error:
            self._note_fault()
            self.faults += 1
            if self.faults > MOST_FAULTS:
                raise GaveUp from error
            time.sleep(0.2)
            return False
        self.faults = 0
        return over

    def _note_fault(self) -> None:
        if not self._said_fault:
            self._said_fault = True
            self.report.say(f"a fault in the monitor, see {self.directory}/monitor.err")
        with contextlib.suppress(OSError):
            append_private(self.directory / "monitor.err", traceback.format_exc())

    def _give_up(self) -> None:
        self.report.inconclusive = (
            f"the monitor stopped because of internal errors (see {self.directory}/monitor.err): nothing is known "
            f"about the job, which continues without the guard; distsim diagnose {self.directory} reads its rings"
        )
        self.report.say(self.report.inconclusive)
        with contextlib.suppress(Exception):  # whatever is broken may break this, too
            self.report.save()
        with contextlib.suppress(Exception):
            self.together.goodbye()


def watch_series(orders: IO[str], answers: IO[str]) -> None:
    """Watch each job that *orders* names until it ends. The output of a monitor is in the job's `monitor.log`."""
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
    """Monitor of a whole test run, started with its first job."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def begin(self, directory: Path, settings: Settings) -> None:
        """Start watching the job in *directory*."""
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
        """Wait until the monitor has finished with the job. One that does not finish is ended."""
        if self._process is None or self._process.stdout is None:
            return
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready or not self._process.stdout.readline():
            self.end(kill=True)

    def end(self, *, kill: bool = False) -> None:
        """Announce that no further job follows."""
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
