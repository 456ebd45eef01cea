"""What a monitor prints: which diagnoses are new, which still hold, and how and where a report is written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distsim.debug.diagnosis.point_to_point import ends
from distsim.debug.messages import are, capital, ranks_text
from distsim.debug.records import Evidence
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.debug.rings.files import write_private
from distsim.text import original_print
from distsim.text.untrusted_input import printable

__all__ = ["left_alone", "news_key", "report_files", "save_report", "say", "show", "still", "went_on"]


def news_key(diagnosis: Diagnosis) -> tuple[Any, ...]:
    """Return the key that makes a diagnosis news: kind, ranks, call, and whether it warns or ends the job."""
    of_message = ends(diagnosis)
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
    """Return the reported diagnoses that still hold, possibly with more ranks."""
    return before.kind is now.kind and set(before.culprits) <= set(now.culprits) and before.call == now.call


def went_on(warning: Diagnosis, evidence: Evidence | None = None) -> str:
    """The line that withdraws a warning; *evidence*: what was seen when it did not hold any more."""
    ranks, call = warning.culprits, warning.call
    event = f"went on by {are(ranks, 'itself', 'themselves')}"
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


def left_alone(directory: Path) -> str:
    """Return the advice for a hung job that nothing ends."""
    return (
        "the job is not ended (DISTSIM_ON_HANG=report): its ranks may wait until their timeout. DISTSIM_ON_HANG=abort "
        f"ends such a job at once. Its flight records: distsim diagnose {shlex.quote(str(directory))}"
    )


def report_files(wanted: str, name: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The files that `DISTSIM_REPORT` = *wanted* means: itself, or two in a folder, as JSON and as text. *name* is the
    job's, where its launcher gave it none."""
    if not wanted or not (wanted.endswith(os.sep) or os.path.isdir(wanted)):
        return [wanted] if wanted else []
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if slurm := environ.get("SLURM_JOB_ID"):
        name = f"slurm-{slurm}.{environ.get('SLURM_STEP_ID', '0')}"
    elif run_id not in ("", "none"):
        name = run_id
    stem = re.sub(r"[^\w.-]", "_", name).lstrip(".") or "job"
    return [os.path.join(os.path.abspath(wanted), f"{stem}.{kind}") for kind in ("json", "txt")]


def say(note: str) -> None:
    """One line on stderr, wrapped on a terminal as the reports are; whole in a log, where it is looked for."""
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
    """Write *report* to each of *paths*, and say in a line where that does not work. Beside a report in a folder
    (`report_files`) goes what the monitor has printed."""
    for number, path in enumerate(paths):
        wanted = Path(path)
        mode = 0o600 if wanted.name.startswith("verdict.") else 0o666  # --report: as the user's umask has it
        try:
            if number and wanted.with_suffix(".json") == Path(paths[number - 1]):
                write_private(wanted, _as_text(report, diagnoses, evidence), mode)
                continue
            if mode == 0o666:
                wanted.parent.mkdir(parents=True, exist_ok=True)
            write_private(wanted, json.dumps(report, indent=1), mode)
        except OSError as error:
            if wanted.name.startswith("verdict.") and not wanted.parent.is_dir():
                continue  # whoever owns the folder took it away: its launcher says so
            original_print(f"distsim: no report in {path} ({error.strerror})", file=sys.stderr)


def _as_text(report: Mapping[str, Any], diagnoses: Sequence[Diagnosis], evidence: Evidence | None) -> str:
    from distsim.debug.report.render import render_diagnoses

    if report.get("inconclusive"):
        return f"{report['inconclusive']}\n"
    if evidence is None or not diagnoses:
        return "nothing is wrong so far\n"
    return render_diagnoses(diagnoses, evidence).plain(120)
