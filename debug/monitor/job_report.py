"""Report of a monitor about its job: it keeps, prints and saves diagnoses.

A diagnosis is reported once. A warning is withdrawn if the job continues. Every change is saved to the verdict files
and to those of `--report`, sent to the monitors of other hosts, and written as an event.
"""

from __future__ import annotations

import contextlib
import json
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distsim.debug.diagnosis.diagnose import ended_well
from distsim.debug.diagnosis.pace.job import PaceNote, outlook_text
from distsim.debug.diagnosis.pace.statistic import Outlook
from distsim.debug.messages import after_the_end, ranks_text
from distsim.debug.monitor.host import Host
from distsim.debug.monitor.peers import PeerSession
from distsim.debug.records import Evidence
from distsim.debug.records.diagnosis import Diagnosis, diagnoses_from_json, diagnoses_to_json
from distsim.debug.records.kinds import Kind
from distsim.debug.report.news import (
    Events,
    came,
    is_late,
    news_key,
    report_files,
    save_report,
    say,
    show,
    still,
    went_on,
)
from distsim.debug.report.rank_states import where_ranks_were
from distsim.debug.rings.files import verdict_path
from distsim.debug.settings import Settings
from distsim.text import original_print
from distsim.text.untrusted_input import printable

WITHDRAW_S = 0.5
"""Seconds between two comparisons of the reported warnings with the state of the ranks."""


class JobReport:
    """The diagnoses that one monitor has reported, and the files and events that have them."""

    def __init__(self, directory: Path, settings: Settings, host: Host, together: PeerSession) -> None:
        self.diagnoses: list[Diagnosis] = []
        self.inconclusive = ""
        """Reason why the job cannot be judged; empty if it can."""
        self.silent: list[dict[str, Any]] | None = None
        """Findings of silent faults as JSON; None if they are not searched for."""
        self.late_ends: list[int] = []
        """Ranks that were killed after their program had ended, if all others have ended well."""
        self.places: list[str] = []
        """Lines with the positions of the ranks when the job was interrupted."""
        self._directory = directory
        self._settings = settings
        self._host = host
        self._together = together
        self._events = Events(settings.events, settings.on_verdict)
        self._evidence: Evidence | None = None
        """Evidence of the last report, for its page."""
        self._reported: set[tuple[Any, ...]] = set()
        self._printed_notes = 0
        self._last_withdrawal = 0.0
        self._is_accepted = False
        """The leader of several hosts has sent its report."""

    @property
    def exit_code(self) -> int:
        """Return the exit code of the first diagnosis that has one; 0 if there are only warnings."""
        return next((code for d in self.diagnoses if (code := d.exit_code)), 0)

    def new_attempt(self) -> None:
        """Forget the diagnoses: the launcher has restarted the job."""
        self._reported.clear()
        self._events.new_attempt()
        self.diagnoses = []

    def unreported(self, diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
        """Return those of *diagnoses* that were not reported yet."""
        return [d for d in diagnoses if news_key(d) not in self._reported]

    def add(self, diagnoses: Iterable[Diagnosis], evidence: Evidence) -> list[Diagnosis]:
        """Print and save the unreported ones of *diagnoses*, and return them."""
        new = self.unreported(diagnoses)
        if not new:
            return new
        from distsim.debug.report.shown import with_evidence

        self._reported.update(news_key(d) for d in new)
        if any(d.exit_code and d.kind is not Kind.JOB_ENDED for d in new):
            self.diagnoses = [d for d in self.diagnoses if d.exit_code]
        self.diagnoses = [d for d in self.diagnoses if not any(still(d, other) for other in new)]
        self.diagnoses += with_evidence(new, evidence)
        self._evidence = evidence
        self.print_diagnoses(new, evidence)
        self.print_notes()
        self.save()
        self._events.diagnosed(new, self.document())
        return new

    def has_warnings_due(self, at_the_end: bool) -> bool:
        """Return whether there are warnings to compare with the state of the ranks now."""
        now = time.monotonic()
        if not any(d.provisional or is_late(d) for d in self.diagnoses):
            return False
        if now - self._last_withdrawal < WITHDRAW_S and not at_the_end:
            return False
        self._last_withdrawal = now
        return True

    def withdraw(self, current: Sequence[Diagnosis], evidence: Evidence) -> None:
        """Withdraw the warnings that are not among the *current* diagnoses, because the job has continued.

        The warning that a rank is late for a call stays, as one of the past.
        """
        if any(d.kind is Kind.JOB_ENDED for d in current):
            return
        left = [d for d in self.diagnoses if not any(still(d, other) for other in current)]
        over = {id(d): past for d in left if (past := came(d, evidence)) is not d or d.provisional}
        self.diagnoses = [over.get(id(d), d) for d in self.diagnoses if id(d) not in over or not d.provisional]
        for diagnosis in over.values():
            self._reported.discard(news_key(diagnosis))
            self.say(text := went_on(diagnosis, evidence))
            self._events.withdrawn(diagnosis, text, self.document())
        if over:
            self.save()

    def accept(self, document: dict[str, Any]) -> None:
        """Take over the leader's report, so that this host's launcher knows it."""
        accepted = diagnoses_from_json(document)
        if not self._is_accepted and not any(d.exit_code for d in accepted):
            for own in self.diagnoses:  # reported while this monitor was alone
                if own.provisional and not any(still(own, other) for other in accepted):
                    self.say(went_on(own))
        self._is_accepted = True
        verdict = next((d for d in self.unreported(accepted) if d.exit_code), None)
        if verdict is not None:
            self.say(
                f"{verdict.kind.label}, {ranks_text(verdict.culprits or verdict.victims)}: the report is in the log of "
                f"host {document.get('host')}, and for distsim diagnose {document.get('rings')} there"
            )
        self.diagnoses = accepted
        self._reported.update(news_key(d) for d in accepted)
        save_report(document, self._verdict_paths())

    # What people see ------------------------------------------------------------------------------

    say = staticmethod(say)

    def print_diagnoses(self, diagnoses: Sequence[Diagnosis], evidence: Evidence) -> None:
        """Print *diagnoses* for people."""
        from distsim.debug.report.render import render_diagnoses

        show(render_diagnoses(diagnoses, evidence))

    def print_places(self, evidence: Evidence) -> None:
        """Print the places and stacks of the ranks at an interrupt, and keep them for `distsim diagnose`."""
        from distsim.debug.report.console import Line
        from distsim.debug.report.render import stack_lines, stack_of

        stacks = {rank: stack for rank in evidence.ranks if (stack := stack_of(rank, evidence))}
        lines = [*map(Line, where_ranks_were(evidence)), *(stack_lines(stacks) if stacks else ())]
        self.places = [" " * (line.indent - 2) + line.text for line in lines]
        text = "\n".join(part.plain.rstrip() for line in lines for part in line.wrapped(120))
        with contextlib.suppress(OSError):
            print(printable(f"INTERRUPTED\n{text}"), file=sys.stderr, flush=True)

    def say_note(self, note: PaceNote) -> None:
        """Print and write a fact about the job's pace."""
        self.say(note.text)
        self._events.pace(note.kind, note.figures, note.text, self.document())

    def write_steps(self, outlook: Outlook) -> None:
        """Write how long the job's steps are, and what can be seen in them; nothing is printed."""
        self._events.pace("steps", asdict(outlook), f"pace: {outlook_text(outlook)}", self.document())

    def say_late_ends(self, evidence: Evidence) -> None:
        """Report ranks that were killed after their program had ended, unless there is a verdict."""
        lines = [] if self.exit_code else after_the_end(evidence.ranks.values())
        for line in lines:
            self.say(line)
        if lines and all(map(ended_well, evidence.ranks.values())):
            self.late_ends = sorted(rank for rank, state in evidence.ranks.items() if state.over)
            self.save()

    def print_notes(self) -> None:
        """Print each irregularity that reading the rings met once, in one line."""
        notes = self._host.notes
        while self._printed_notes < len(notes):
            note = notes[self._printed_notes]
            self._printed_notes += 1
            if note not in notes[: self._printed_notes - 1]:
                self.say(note)

    # Files ------------------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """Return the report as JSON."""
        report: dict[str, Any] = {
            "schema": "distsim.report/1",
            **diagnoses_to_json(self.diagnoses),
            "exit_code": self.exit_code,
            "world_size": self._host.world_size,
            "rings": str(self._directory),
            "host": platform.node(),
            "job": next((reader.header.job for reader in self._host.readers.values()), ""),
        }
        if self.silent is not None:
            report["silent"] = self.silent
        further = {"killed_after_end": self.late_ends, "interrupted": self.places, "inconclusive": self.inconclusive}
        return report | {name: value for name, value in further.items() if value}

    def save(self) -> None:
        """Write the report to its files and send it to the other hosts."""
        document = self.document()
        wanted = report_files(self._settings.report, self._host.job or self._directory.name)
        save_report(document, [*self._verdict_paths(), *wanted], self.diagnoses, self._evidence)
        self._together.tell(document)

    def finish(self) -> None:
        """Write the event that ends the job, and the report if it goes to standard output."""
        if self._settings.report == "-":
            original_print(json.dumps(self.document(), indent=1), flush=True)
        self._events.finished(self.document())

    def _verdict_paths(self) -> list[str]:
        # Another job's monitor may write into the same folder.
        own = [] if self._host.job is None else [str(verdict_path(self._directory, self._host.job))]
        return [*own, str(self._directory / "verdict.json")]
