"""Events of a job as JSON lines, and the command that is run at its verdict.

`--events FILE|-` (`DISTSIM_EVENTS`) and `--on-verdict COMMAND` (`DISTSIM_ON_VERDICT`). Nothing that goes wrong here
changes how the job ends: a file that cannot be written and a command that fails or hangs are one line each.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.debug.report.news import say

__all__ = ["COMMAND_S", "SCHEMA", "Events"]

SCHEMA = "distsim.events/1"
"""Grows by new keys and events only; a key that changes its meaning makes it `/2`."""
COMMAND_S = 10.0
"""The wall time of a command of `--on-verdict`, which is then ended."""
_POLL_S = 0.05


class Events:
    """Writes the events of one job, and runs the command at its first verdict."""

    def __init__(self, path: str, command: str, say: Callable[[str], None] = say) -> None:
        self.path = path
        self.command = command
        self._say = say
        self._began_s = time.monotonic()
        self._commands: list[threading.Thread] = []
        self._is_verdict_known = self._is_over = False

    def diagnosed(self, diagnoses: Iterable[Diagnosis], report: Mapping[str, Any]) -> None:
        """Write an event for each of *diagnoses*; at the first verdict, run the command with *report* as its input."""
        fatal = False
        for diagnosis in diagnoses:
            event = "verdict" if diagnosis.exit_code else "warning"
            if diagnosis.kind is Kind.STRAGGLER and not diagnosis.exit_code:
                event = "straggler"
            fatal = fatal or event == "verdict"
            self._write(event, report, exit_code=diagnosis.exit_code, diagnosis=diagnosis.to_json())
        if fatal:
            self._run(report)

    def withdrawn(self, diagnosis: Diagnosis, text: str, report: Mapping[str, Any]) -> None:
        """Write that a warning no longer holds, with the line that says so."""
        self._write("withdrawn", report, text=text, diagnosis=diagnosis.to_json())

    def new_attempt(self) -> None:
        """A restart of the job: its first verdict runs the command again."""
        self._is_verdict_known = False

    def finished(self, report: Mapping[str, Any]) -> None:
        """Write that the job is over, once, and wait until commands have ended."""
        if self._is_over:
            return
        self._is_over = True
        if report["exit_code"]:  # of a simulation in which a rank raised, which is no diagnosis
            self._run(report)
        facts = {key: report[key] for key in ("virtual_time_s", "inconclusive") if report.get(key)}
        if "virtual_time_s" not in facts:
            facts["elapsed_s"] = time.monotonic() - self._began_s
        self._write("finished", report, exit_code=report["exit_code"], **facts)
        for command in self._commands:
            command.join(COMMAND_S + 1.0)

    def _write(self, event: str, report: Mapping[str, Any], **facts: Any) -> None:
        if not self.path:
            return
        known = {key: report[key] for key in ("job", "world_size", "rings", "program", "cluster") if report.get(key)}
        line = {"schema": SCHEMA, "event": event, "unix_s": time.time(), "host": platform.node(), **known, **facts}
        try:
            if self.path == "-":
                print(json.dumps(line), flush=True)
                return
            # O_NONBLOCK: a FIFO that nobody reads is refused, and does not stop the monitor.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            with open(os.open(self.path, flags, 0o666), "wb", buffering=0) as file:
                file.write(f"{json.dumps(line)}\n".encode())
        except (OSError, ValueError) as error:
            self._say(f"no events in {self.path} ({getattr(error, 'strerror', None) or error})")
            self.path = ""

    def _run(self, report: Mapping[str, Any]) -> None:
        if not self.command or self._is_verdict_known:
            return
        self._is_verdict_known = True
        try:
            with tempfile.TemporaryFile() as file:  # not a pipe: the command need not read it
                file.write(json.dumps(report, indent=1).encode() + b"\n")
                file.seek(0)
                process = subprocess.Popen(
                    self.command, shell=True, stdin=file, stdout=2, stderr=2, start_new_session=True
                )
        except (OSError, ValueError) as error:
            self._say(f"--on-verdict: {self.command!r} could not be run ({getattr(error, 'strerror', None) or error})")
            return
        self._commands.append(
            threading.Thread(target=self._await, args=(process,), name="distsim-command", daemon=True)
        )
        self._commands[-1].start()

    def _await(self, process: subprocess.Popen[bytes]) -> None:
        try:
            code = process.wait(COMMAND_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._say(f"--on-verdict: {self.command!r} did not end within {COMMAND_S:.0f} s, and was ended")
            return
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            self._say(f"--on-verdict: {self.command!r} failed ({how}); the job's outcome is not changed by that")
