"""`python -m distsim.debug.monitor DIR --job JOB`: the monitor of a host, as its ranks start it.

It survives its own errors. With `--series`, one process serves the many short jobs of a test run: each line of its
input describes a job, `{"directory": ..., "environment": {...}}`; a line of its output reports the end of that job. The
process exits at the end of its input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from distsim.debug.monitor.loop import Monitor
from distsim.debug.rings.files import append_private
from distsim.debug.settings import Settings

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
        # Standard output is for the answers.
        events, report = ("" if name == "-" else name for name in (settings.events, settings.report))
        settings = replace(settings, events=events, report=report)
        Steady(directory, settings, None).run()
        print("over", file=answers, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m distsim.debug.monitor DIR --job JOB`; the settings come from the environment."""
    parser = argparse.ArgumentParser(prog="distsim.debug.monitor")
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--job")
    parser.add_argument("--series", action="store_true", help="watch job after job, as standard input names them")
    args = parser.parse_args(argv)
    if args.series == (args.directory is not None):
        parser.error("expected a directory, or --series")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they end the ranks; the report follows
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(5)  # the ranks come first
    if args.series:
        watch_series(sys.stdin, sys.stdout)
        return 0
    settings = Settings.read()
    return Steady(args.directory, settings, args.job or None).run()


if __name__ == "__main__":
    sys.exit(main())
