"""Reports about a job, and ends ranks that do not end themselves.

A diagnosis is reported once. A warning is withdrawn if the job continues. Every change is saved to the verdict files
and to those of `--report`, sent to the monitors of other hosts, and written as an event.

A hang may end the ranks of a host, first by SIGTERM. A job that still makes calls is not ended because something is
only slow, unless the user has set a limit. Ranks whose launcher was killed are orphans: the store in which they meet
is gone with it, and they do not know.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from distsim.debug.evidence.processes import look
from distsim.debug.evidence.rank_state import given_up
from distsim.debug.monitor.host import Host
from distsim.debug.monitor.peers import PeerSession
from distsim.debug.records import Evidence
from distsim.debug.records.diagnosis import Diagnosis, diagnoses_from_json, diagnoses_to_json
from distsim.debug.records.kinds import Proof
from distsim.debug.report.news import Events, news_key, report_files, save_report, say, show, still, went_on
from distsim.debug.report.rank_states import where_ranks_were
from distsim.debug.rings.files import verdict_path
from distsim.debug.settings import OnHang, Settings
from distsim.text.untrusted_input import printable

__all__ = ["ORPHANS_S", "JobReport", "Orphans", "among_moving", "end_ranks", "kill", "without_guesses"]


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
        self._reported.update(news_key(d) for d in new)
        if any(d.exit_code for d in new):
            self.diagnoses = [d for d in self.diagnoses if d.exit_code]
        self.diagnoses = [d for d in self.diagnoses if not any(still(d, other) for other in new)]
        self.diagnoses += new
        self._evidence = evidence
        self.print_diagnoses(new, evidence)
        self.print_notes()
        self.save()
        self._events.diagnosed(new, self.document())
        return new

    def has_warnings_due(self, at_the_end: bool) -> bool:
        """Return whether there are warnings to compare with the state of the ranks now."""
        now = time.monotonic()
        if not any(d.provisional for d in self.diagnoses):
            return False
        if now - self._last_withdrawal < WITHDRAW_S and not at_the_end:
            return False
        self._last_withdrawal = now
        return True

    def withdraw(self, current: Sequence[Diagnosis], evidence: Evidence) -> None:
        """Withdraw the warnings that are not among the *current* diagnoses, because the job has continued."""
        over = [d for d in self.diagnoses if d.provisional and not any(still(d, other) for other in current)]
        for diagnosis in over:
            self.diagnoses.remove(diagnosis)
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
            "job": next((reader.header.job for reader in self._host.readers.values()), ""),
        }
        if self.silent is not None:
            report["silent"] = self.silent
        if self.places:
            report["interrupted"] = self.places
        if self.inconclusive:
            report["inconclusive"] = self.inconclusive
        return report

    def save(self) -> None:
        """Write the report to its files and send it to the other hosts."""
        document = self.document()
        wanted = report_files(self._settings.report, self._host.job or self._directory.name)
        save_report(document, [*self._verdict_paths(), *wanted], self.diagnoses, self._evidence)
        self._together.tell(document)

    def finish(self) -> None:
        """Write the event that ends the job."""
        self._events.finished(self.document())

    def _verdict_paths(self) -> list[str]:
        # Another job's monitor may write into the same folder.
        own = [] if self._host.job is None else [str(verdict_path(self._directory, self._host.job))]
        return [*own, str(self._directory / "verdict.json")]


GOES_ON_S = 10.0
"""Seconds within which some rank has made or ended a call in a job that makes progress."""
BY_THE_LIMIT = (
    "Other ranks still make calls, so this is not proof that it never comes: it is a hang by the limit you set "
    "(--hang-after)."
)
ORPHANS_S = 10.0
"""Time in seconds that ranks have to complete their rendezvous after their launcher was killed."""

SHOWN = 16
"""Maximum number of process ids in a line."""


def end_ranks(host: Host, grace_s: float) -> None:
    """Send SIGTERM, and finally SIGKILL, to every living rank of *host*.

    Exit handlers of ranks that have raised get *grace_s* seconds to save and upload their data.
    """
    families = _families(host)
    leaving = {rank for rank, reader in host.readers.items() if given_up(reader)}
    kill(host, signal.SIGTERM, but=leaving)
    _until_ended(host, grace_s, leaving)
    kill(host, signal.SIGTERM)
    _until_ended(host, 2.0, host.readers)
    kill(host, signal.SIGKILL)
    for leader in families:
        with contextlib.suppress(OSError):
            os.killpg(leader, signal.SIGKILL)


def _families(host: Host) -> list[int]:
    """Return the ranks' process groups, where each has its own, as the launcher's have: what ranks have started (a
    data loader's workers) would outlive them, and hold the job's output open.
    """
    pids, alone = [], []
    for reader in host.readers.values():
        pid, ticks = reader.header.pid, reader.header.start_ticks
        with contextlib.suppress(OSError):
            if look(pid, ticks) is not None:
                alone.append(os.getsid(pid) == pid)
            elif look(pid) is not None:
                continue  # another process has the number by now
        pids.append(pid)
    return pids if alone and all(alone) else []


def _until_ended(host: Host, limit_s: float, ranks: Collection[int]) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not all(host.ended()[rank] for rank in ranks):
        time.sleep(0.05)


def kill(host: Host, number: int, but: Collection[int] = ()) -> None:
    """Send a signal to every rank of this host that still lives."""
    for rank, gone in host.ended().items():
        if not gone and rank not in but:
            with contextlib.suppress(OSError):
                os.kill(host.readers[rank].header.pid, number)


def without_guesses(diagnoses: Sequence[Diagnosis], settings: Settings, still_s: float) -> list[Diagnosis]:
    """Return the *diagnoses* that still hold if no rank has made or ended a call for *still_s*.

    If the user has set no limit, a wait that is only long does not end a job in which some rank has made a call in
    that time, because torch's own timeout may be longer than our default. Such a diagnosis is left out, or is a
    warning while calls continue.
    """
    if settings.hang_after_s is not None or still_s >= settings.patience_s:
        return list(diagnoses)
    if still_s > GOES_ON_S:
        return [d for d in diagnoses if d.proof is not Proof.PATIENCE]
    return [replace(d, proof=Proof.NOT_YET) if d.proof is Proof.PATIENCE else d for d in diagnoses]


def among_moving(diagnoses: Sequence[Diagnosis], settings: Settings) -> list[Diagnosis]:
    """Return the diagnoses that hold although ranks made calls in the meantime: only waits that are too long."""
    long = [d for d in diagnoses if (d.detected_after_s or 0.0) >= settings.patience_s]
    if settings.hang_after_s is None:
        return [replace(d, proof=Proof.NOT_YET) for d in long]
    return [replace(d, explanation=f"{d.explanation} {BY_THE_LIMIT}") for d in long]


class WatchingMonitor(Protocol):
    """Interface of the monitor to the code that ends ranks."""

    host: Host
    settings: Settings
    report: JobReport
    aborted: bool

    def abort(self) -> None: ...


class Orphans:
    """Notices that the launcher of a job is gone before the job is over."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._since: float | None = None
        """Time at which the launcher's death was noticed and reported."""

    def step(self, monitor: WatchingMonitor) -> None:
        """Report a dead launcher once, and end ranks that can no longer meet if a hang is to end the job."""
        host = monitor.host
        if monitor.aborted or not self.launcher_died() or all(host.ended().values()):
            return
        now = time.monotonic()
        meeting = not host.joined() and host.local_world >= host.world_size > 1
        if self._since is None:
            self._since = now
            text = "the launcher has ended (killed?)"
            if meeting:
                text += " while its ranks meet in init_process_group, in a store that was the launcher's: they would "
                text += "wait there until their timeout (10 minutes). Start the job again"
            else:
                pids = sorted({str(host.readers[rank].header.pid) for rank, over in host.ended().items() if not over})
                text += "; its ranks continue, and are watched until they end "
                text += f"(kill {' '.join(pids[:SHOWN])}{' ...' if len(pids) > SHOWN else ''} ends them)"
            monitor.report.say(text)
        elif meeting and now - self._since > ORPHANS_S and monitor.settings.on_hang is OnHang.ABORT:
            monitor.report.say(f"its ranks did not complete their rendezvous within {ORPHANS_S:.0f} s, and are ended")
            monitor.abort()

    def launcher_died(self) -> bool:
        """Return whether this host's launcher has died without reporting the end of the job."""
        try:
            content = json.loads((self._directory / "launcher.json").read_text())
            gone = content.get("host") == platform.node() and look(int(content["pid"]), int(content["start"])) is None
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            return False
        return gone and not (self._directory / "done.json").exists()
