"""Prints and writes what a monitor reports: new diagnoses, withdrawn ones, and events of a job as lines of JSON.

The options are `--events FILE|-|otlp` (`DISTSIM_EVENTS`) and `--on-verdict COMMAND` (`DISTSIM_ON_VERDICT`). If a file
cannot be written, or a command fails or hangs, one line says so, and the job ends as it would have without them.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distsim.debug.messages import are, capital, group_text, ranks_text, site_text
from distsim.debug.records import Evidence
from distsim.debug.records.diagnosis import Diagnosis, message_key
from distsim.debug.records.kinds import Kind
from distsim.debug.rings.files import write_private
from distsim.debug.settings import OTLP
from distsim.errors import UsageError
from distsim.text import original_print
from distsim.text.untrusted_input import printable


def news_key(diagnosis: Diagnosis) -> tuple[Any, ...]:
    """Return the key that makes a diagnosis news: kind, ranks, call, and whether it warns or ends the job."""
    of_message = message_key(diagnosis)
    if of_message is not None:
        return of_message  # two lines that do not fit do so again and again
    call = diagnosis.call
    return (
        diagnosis.kind,
        diagnosis.culprits,
        diagnosis.group.name if diagnosis.group else None,
        (call.op, call.seq) if call else None,
        diagnosis.provisional,
        diagnosis.ends_job,
    )


def still(before: Diagnosis, now: Diagnosis) -> bool:
    """Return the reported diagnoses that still apply, possibly with more ranks."""
    return before.kind is now.kind and set(before.culprits) <= set(now.culprits) and before.call == now.call


def went_on(warning: Diagnosis, evidence: Evidence | None = None) -> str:
    """Return the line that withdraws a warning; *evidence* is the state in which it no longer applied."""
    ranks, call = warning.culprits, warning.call
    event = "continued" if warning.came_after_s is None else f"came after {warning.came_after_s:.1f} s"
    if warning.kind is Kind.NEVER_JOINED and call is not None and evidence is not None:
        waits_s = [
            record.completed_s - record.issued_s
            for rank in warning.victims
            for record in evidence.records.get(rank, ())
            if (record.op, record.seq) == (call.op, call.seq) and record.completed_s is not None
        ]
        if waits_s:
            event = f"joined after {max(waits_s):.1f} s"
    where = f", {call}" if call else ""
    return f"{capital(ranks_text(ranks))} {event}: the warning ({warning.kind.label}{where}) is withdrawn"


def is_late(warning: Diagnosis) -> bool:
    """Return whether *warning* says that ranks are late for a call, which they may make after it."""
    is_of_call = warning.kind is Kind.STRAGGLER and warning.call is not None and not warning.pace
    return is_of_call and warning.came_after_s is None and not warning.provisional


def came(warning: Diagnosis, evidence: Evidence) -> Diagnosis:
    """Return *warning* as one of the past if it says that ranks are late for a call which all of them have made since.

    If the call is no longer in the records, the wait was at least as long as when the warning was given.
    """
    group, call, late, waiting = warning.group, warning.call, warning.culprits, warning.victims
    if not is_late(warning) or group is None or call is None:
        return warning
    issued_s = {
        rank: {record.seq: record.issued_s for record in evidence.records.get(rank, ()) if record.group == group}
        for rank in (*late, *waiting)
    }
    if any(max(issued_s[rank], default=0) < call.seq for rank in late):
        return warning
    times_s = [of_rank[call.seq] for of_rank in issued_s.values() if call.seq in of_rank]
    waited_s = max(warning.detected_after_s or 0.0, max(times_s, default=0.0) - min(times_s, default=0.0))
    where, there = (
        next((f" at {site_text(warning.sites[rank])}" for rank in ranks if rank in warning.sites), "")
        for ranks in (late, waiting)
    )
    text = f"{capital(ranks_text(late))}{where} {are(late, 'was', 'were')} late for {call} on {group_text(group)} and "
    text += f"came after {waited_s:.1f} s. {capital(ranks_text(waiting))} waited{there}."
    return replace(warning, explanation=text, stuck={}, came_after_s=waited_s)


def left_alone(directory: Path) -> str:
    """Return the advice for a hung job that is not ended automatically."""
    return (
        "the job is not ended (DISTSIM_ON_HANG=report): its ranks may wait until their timeout. DISTSIM_ON_HANG=abort "
        f"ends such a job at once. Its flight records: distsim diagnose {shlex.quote(str(directory))}"
    )


def report_files(wanted: str, name: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the files for `DISTSIM_REPORT` = *wanted*: the file itself, or two in a folder, as JSON and as text.

    *name* is used for the job if its launcher has given it none.
    """
    if not (wanted.endswith(os.sep) or os.path.isdir(wanted)):
        return [] if wanted in ("", "-") else [wanted]  # standard output gets it at the end of the job
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if slurm := environ.get("SLURM_JOB_ID"):
        name = f"slurm-{slurm}.{environ.get('SLURM_STEP_ID', '0')}"
    elif run_id not in ("", "none"):
        name = run_id
    stem = re.sub(r"[^\w.-]", "_", name).lstrip(".") or "job"
    return [os.path.join(os.path.abspath(wanted), f"{stem}.{kind}") for kind in ("json", "txt")]


def say(note: str) -> None:
    """Print one line to stderr, wrapped on a terminal as reports are, and unwrapped in a log."""
    line, width = f"distsim: {printable(note)}", 0
    with contextlib.suppress(OSError, ValueError):
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    if width:
        words = textwrap.TextWrapper(max(width, 20), "", "  ", break_long_words=False, break_on_hyphens=False)
        line = words.fill(line)
    with contextlib.suppress(OSError):
        original_print(line, file=sys.stderr, flush=True)


def show(report: Any) -> None:
    """Print a report on stderr: as wide as a terminal, or 120 columns."""
    from distsim.debug.report.console import Console, piped_width

    tty = sys.stderr.isatty()
    console = Console(stderr=True, soft_wrap=True) if tty else Console(file=sys.stderr, width=piped_width(120))
    with contextlib.suppress(OSError):
        console.print(report, crop=False)
        sys.stderr.flush()


def save_report(
    report: dict[str, Any], paths: Sequence[str], diagnoses: Sequence[Diagnosis] = (), evidence: Evidence | None = None
) -> None:
    """Write *report* to each of *paths*, and print a line for each failure.

    Next to a report in a folder (`report_files`), the text that the monitor has printed is written.
    """
    for number, path in enumerate(paths):
        wanted = Path(path)
        is_own = wanted.name.startswith("verdict.")
        try:
            if number and wanted.with_suffix(".json") == Path(paths[number - 1]):
                write_private(wanted, _as_text(report, diagnoses, evidence))
                continue
            if not is_own:
                wanted.parent.mkdir(parents=True, exist_ok=True)
            write_private(wanted, json.dumps(report, indent=1))
        except OSError as error:
            if is_own and not wanted.parent.is_dir():
                continue  # whoever owns the folder took it away: its launcher says so
            original_print(f"distsim: no report in {path} ({error.strerror})", file=sys.stderr)


def _as_text(report: Mapping[str, Any], diagnoses: Sequence[Diagnosis], evidence: Evidence | None) -> str:
    from distsim.debug.report.render import render_diagnoses

    if report.get("inconclusive"):
        return f"{report['inconclusive']}\n"
    if evidence is None or not diagnoses:
        return "nothing is wrong so far\n"
    return render_diagnoses(diagnoses, evidence).plain(120)


SCHEMA = "distsim.events/1"
"""Grows by new keys and events only; a key that changes its meaning makes it `/2`."""
COMMAND_S = 10.0
"""The wall time of a command of `--on-verdict`, which is then ended."""


class Events:
    """Writes the events of one job, and runs the command at its first verdict."""

    def __init__(self, path: str, command: str, say: Callable[[str], None] = say) -> None:
        self.path = path
        self.command = command
        self._say = say
        self._began_s = time.monotonic()
        self._commands: list[threading.Thread] = []
        self._is_verdict_known = self._is_over = False
        self._otlp: Any = None
        if path == OTLP:
            from distsim.debug.report.otlp import OtlpSender

            try:
                self._otlp = OtlpSender()
            except UsageError as error:
                say(str(error))
                self.path = ""

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

    def pace(self, kind: str, figures: Mapping[str, Any], text: str, report: Mapping[str, Any]) -> None:
        """Write a fact about the job's pace, with the printed line."""
        self._write("pace", report, kind=kind, text=text, pace=dict(figures))

    def withdrawn(self, diagnosis: Diagnosis, text: str, report: Mapping[str, Any]) -> None:
        """Write the event that a warning no longer applies, with the printed line."""
        self._write("withdrawn", report, text=text, diagnosis=diagnosis.to_json())

    def new_attempt(self) -> None:
        """Handle a restart of the job: its first verdict runs the command again."""
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
        if self._otlp is not None:
            self._otlp.close()

    def _write(self, event: str, report: Mapping[str, Any], **facts: Any) -> None:
        if not self.path:
            return
        known = {key: report[key] for key in ("job", "world_size", "rings", "program", "cluster") if report.get(key)}
        line = {"schema": SCHEMA, "event": event, "unix_s": time.time(), "host": platform.node(), **known, **facts}
        if self._otlp is not None:
            self._otlp.send(line)
            return
        try:
            if self.path == "-":
                print(json.dumps(line), flush=True)
                return
            # O_NONBLOCK: a FIFO that nobody reads is refused, and does not stop the monitor.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            with open(os.open(self.path, flags, 0o600), "wb", buffering=0) as file:
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
