"""What a monitor says: which diagnoses are news, which hold still, how a line is said and a report is left."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distsim.debug.diagnosis.pairs.suspected_messages import ends
from distsim.debug.messages.phrases import are, capital, ranks_text
from distsim.debug.records import Evidence
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.debug.rings.private import write_private
from distsim.text.untrusted_input import printable

__all__ = ["news_key", "save_report", "say", "show", "still", "went_on"]


def news_key(diagnosis: Diagnosis) -> tuple[Any, ...]:
    """What makes it news: who, what, in which call, and whether it is a warning, or ends the job, by now."""
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


def still(told: Diagnosis, now: Diagnosis) -> bool:
    """What was told still holds, maybe of more ranks."""
    return told.kind is now.kind and set(told.culprits) <= set(now.culprits) and told.call == now.call


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


def say(note: str) -> None:
    """One line on stderr, wrapped on a terminal as the reports are; whole in a log, where it is looked for."""
    said, width = f"distsim: {printable(note)}", 0
    with contextlib.suppress(OSError, ValueError):
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    if width:
        words = textwrap.TextWrapper(max(width, 20), "", "  ", break_long_words=False, break_on_hyphens=False)
        said = words.fill(said)
    with contextlib.suppress(OSError):
        print(said, file=sys.stderr, flush=True)


def show(report: Any) -> None:
    """Print a report on stderr: as wide as a terminal, or 120 columns."""
    from distsim.debug.report.console import Console, piped_width

    tty = sys.stderr.isatty()
    console = Console(stderr=True, soft_wrap=True) if tty else Console(file=sys.stderr, width=piped_width(120))
    with contextlib.suppress(OSError):
        console.print(report, crop=False)
        sys.stderr.flush()


def save_report(report: dict[str, Any], paths: Sequence[str]) -> None:
    """Write *report* to each of *paths*, and say in a line where that does not work."""
    for path in paths:
        wanted = Path(path)
        mode = 0o600 if wanted.name.startswith("verdict.") else 0o666  # --report: as the user's umask has it
        try:
            write_private(wanted, json.dumps(report, indent=1), mode)
        except OSError as error:
            if wanted.name.startswith("verdict.") and not wanted.parent.is_dir():
                continue  # whoever owns the folder took it away: its launcher says so
            print(f"distsim: no report in {path} ({error.strerror})", file=sys.stderr)
