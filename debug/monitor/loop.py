"""The monitor process of a host: reads the rings of its ranks, diagnoses faults, and ends the job if asked to.

It needs no cooperation of the ranks, so it also diagnoses one that was killed, stopped, or holds the interpreter
lock. It imports no torch. Started by `distsim.debug.monitor.start`; ends when the ranks have ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distsim.debug.diagnosis.causes.ends import UNSEEN, ended_by, verdict_before
from distsim.debug.diagnosis.causes.recovery import recoveries
from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.diagnosis.point_to_point import with_messages
from distsim.debug.diagnosis.waits.standstill import IDLE_S
from distsim.debug.evidence.guard_findings import unwaited
from distsim.debug.evidence.guard_flags import findings
from distsim.debug.evidence.processes import LauncherProcess, as_text, catches, child_stacks, collect, launcher_of
from distsim.debug.evidence.rank_state import build_evidence, settle_stuck
from distsim.debug.matching.comparer import PAIR, GroupKey, Suspicion, Suspicions, world_of
from distsim.debug.matching.secondary_errors import given_up
from distsim.debug.messages import after_the_end
from distsim.debug.monitor.ends import Orphans, among_moving, end_ranks, without_guesses
from distsim.debug.monitor.host import Host
from distsim.debug.monitor.job_report import JobReport
from distsim.debug.monitor.peers import PeerSession
from distsim.debug.monitor.start import VERDICT_WAIT_S
from distsim.debug.monitor.straggler_watch import PaceWatch
from distsim.debug.records import Evidence, Phase, RankThread
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind, Proof
from distsim.debug.report.news import left_alone, news_key
from distsim.debug.report.rank_states import MARKER
from distsim.debug.rings.files import create_private, default_bases, write_private
from distsim.debug.rings.reader import origin_of
from distsim.debug.settings import Level, OnHang, OnSlow, Settings, Silent

BUSY_POLL_S = 0.1
QUIET_POLL_S = 0.05
"""Seconds between polls while ranks make calls (BUSY_POLL_S) and while they do not, when one may be stuck."""
SETTLE_S = 0.25
"""Seconds that a call must have waited before a judgement, and twice in a row without any progress in between."""
DEATH_SETTLE_S = 0.35
"""Seconds after a death in which the errors of other ranks and the launcher's report about the exit code arrive."""
ON_THEIR_WAY_S = 1.5
"""Seconds before a death is reported for which no rank waits, because the others may still reach their next call."""
RAISE_S = 5.0
"""Seconds that level strict has to raise on a busy host. After that, contradicting calls count as calls that it did
not hold.
"""
DYING_S = 2.0
"""Seconds within which ranks without a handler end by one signal: a large process is not gone at once."""
GRACE_S = 35.0
"""The same of ranks that handle it: launchers and schedulers kill them after 30 s (torchrun, KillWait of SLURM)."""
BACK_S = 1.0
"""Seconds that ranks have after an absence of the monitor to write a heartbeat, which takes a tenth of that."""
LIVING = (Phase.RUNNING, Phase.BLOCKED, Phase.FROZEN, Phase.HOST_STUCK)
PATIENCE_S = 20.0
"""Time in seconds after which a monitor ends if the job has created no ring."""


class Monitor:
    """Watches the ranks of one host."""

    grace_s = 10.0
    """Seconds that an abort leaves exit handlers of ranks that have raised."""

    def __init__(self, directory: Path, settings: Settings, job: str | None) -> None:
        self.directory = directory
        self.settings = settings
        self.host = Host(directory, job)
        self.together = PeerSession(directory)
        self.pace = PaceWatch()
        self.report = JobReport(directory, settings, self.host, self.together)
        self._started = time.monotonic()
        self._last_counts: tuple[int, ...] = ()
        self._still_since = time.monotonic()
        self._next_judgement = 0.0
        self._delay = SETTLE_S
        self._first_death: float | None = None
        self._first_found: float | None = None
        self._first_met: float | None = None
        """Time of the first contradiction that blocks no rank; None before it."""
        self._suspicions = Suspicions()
        self.aborted = False
        self._attempt = 0
        self._flagged = 0
        self._asked: float | None = None
        self._last_back = 0.0
        self._absences = 0
        self._closing = False
        """Whether the launcher is ending the ranks, so that their deaths are not reported."""
        self._orphans = Orphans(directory)
        self._children: dict[int, tuple[int, tuple[RankThread, ...]]] = {}
        """Child processes of each rank, and the number of its calls, when the stacks were read last."""
        self._launcher: LauncherProcess | None = None
        self._launched()

    # The loop -----------------------------------------------------------------------------------

    def run(self) -> int:
        """Watch until the ranks have ended. Return the exit code of the verdict."""
        with self.host.away:
            while not self._turn():
                pass
            self._farewell()
        return self.report.exit_code

    def _turn(self) -> bool:
        """Examine everything once, and return whether the job is over."""
        self.host.find(self.together.processes())
        self.report.print_notes()
        moved = self.host.read(self.together.route)
        self.host.activity.step(self.host.readers)
        self.together.step(self)
        self._new_attempt()
        self._compare()
        self._miss_rings()
        if self._judges():
            self._notice()
            self._keep_pace()
            self._judge(moved)
        self._withdraw()
        self._answer()
        self._orphans.step(self)
        if self.together.abort_asked and not self.aborted:
            self.abort()
        if self._over():
            return True
        time.sleep(BUSY_POLL_S if moved else QUIET_POLL_S)
        self._was_away()
        return False

    def _was_away(self) -> bool:
        """Return whether the monitor itself was suspended since the last call."""
        times = self.host.away.look()
        if times == self._absences:
            return False
        self._absences = times
        self._back(time.monotonic())
        return True

    def _miss_rings(self) -> None:
        """Note that rings were removed before they were mapped.

        Nothing will ever be known about their ranks, so no call can be reported as missing.
        """
        readers = self.host.readers.values()
        if self.report.inconclusive or not readers or len(readers) >= self.host.local_world:
            return
        if not all(reader.path.exists() for reader in readers):
            self.report.inconclusive = (
                f"the flight records in {self.directory} were removed before the monitor had seen those of all ranks: "
                "the job continues without the guard, hangs are not reported"
            )
            self.report.say(self.report.inconclusive)

    def _back(self, now: float) -> None:
        """Handle a suspension of the monitor itself: wait for new heartbeats before diagnosing.

        On a host that is so busy that every sleep takes long, it diagnoses after all.
        """
        if now - self._last_back > 10 * BACK_S:
            self._last_back = self._still_since = now
            self._next_judgement = max(self._next_judgement, now + BACK_S)
            self._first_death = self._first_found = None

    def _new_attempt(self) -> None:
        """Forget the previous attempt after a restart of the job."""
        attempt = self.host.attempt
        if attempt == self._attempt:
            return
        self._attempt = attempt
        self.report.new_attempt()
        self._suspicions = Suspicions()
        self.pace = PaceWatch()
        self._first_death = self._first_found = self._first_met = None
        self._closing = self.aborted = False

    def _answer(self) -> None:
        """Judge once more for a launcher that saw a rank fail and waits before it ends the others."""
        answers = [path.with_name(path.name.replace("ask", "answer")) for path in self.directory.glob("ask.*")]
        requests = [path for path in answers if not path.exists()]
        if not requests:
            return
        now = time.monotonic()
        self._asked = self._asked or now
        if self._interrupted():
            self._show_places()
        elif not self.report.exit_code and now - self._asked < DEATH_SETTLE_S:
            return
        elif not self.report.exit_code and not self._judges() and now - self._asked < DEATH_SETTLE_S + 2.5:
            return  # the leader's verdict is on its way
        elif not self.report.exit_code and self._judges():
            evidence = self.look()
            diagnoses = self._judgement(evidence)
            late = not diagnoses and bool(after_the_end(evidence.ranks.values()))
            if late and not all(self.host.ended().values()) and now - self._asked < VERDICT_WAIT_S - 1:
                return  # nothing is wrong: the launcher would end ranks that are about to end by themselves
            self.tell(diagnoses, evidence)
        self._asked = None
        self._closing = True
        for path in requests:
            os.close(create_private(path))

    def _over(self) -> bool:
        if not self.host.readers:
            return self._released() or (time.monotonic() - self._started > PATIENCE_S and not self._launched())
        if not all(self.host.ended().values()) or (self.together.waits_for_others(self.host) and not self.aborted):
            return False
        # A restart's rings may be on their way.
        return self._released() or not self._launched()

    def _launched(self) -> bool:
        """Return whether there is a living launcher, which reports the end of the job."""
        self._launcher = launcher_of(self.directory) or self._launcher  # the folder may have been removed
        return self._launcher is not None and self._launcher.is_alive

    def _interrupted(self) -> bool:
        return (self.directory / MARKER).exists()

    def _released(self) -> bool:
        return (self.directory / "done.json").exists()

    # Calls that contradict each other -------------------------------------------------------------

    def _compare(self) -> None:
        suspicions = [*self.host.comparer.check(), *self.together.suspected()]
        if self.settings.level is Level.RECORD:
            return  # what all have called is known, and no longer held
        self._suspicions.add((one for one in suspicions if not self._ranks_raise(one)), time.monotonic())
        if self._judges():
            self._look_at_suspicions(time.monotonic())
        elif self.together.hears_suspicions():
            self.together.suspect(self._suspicions.hand_over())

    def _ranks_raise(self, suspicion: Suspicion) -> bool:
        """Return whether level strict reports the contradiction itself, before any byte is sent.

        For messages it does so only between ranks of one host.
        """
        if self.settings.level is not Level.STRICT or suspicion.lines_only:
            return False
        key = suspicion.key
        return not key[0].startswith(PAIR) or all(rank in self.host.readers for rank in self._members(key))

    def _members(self, key: GroupKey) -> tuple[int, ...]:
        """Return the members of a group or message, by the ranks that diagnoses use."""
        numbering, world = self.host.numbering, world_of(key)
        return tuple(numbering.in_job(world, rank) for rank in key[1])

    def _look_at_suspicions(self, until: float) -> None:
        """Check the suspicions that are due by *until* against the evidence."""
        focus = self._suspicions.due(until)
        if not focus:
            return
        evidence = self.look(focus=focus)
        self._suspicions.looked_at(focus, evidence.records, time.monotonic(), self._members)
        diagnoses = [d for d in diagnose(evidence) if d.exit_code == 4]
        pairs = {(PAIR, self._members(key), key[2]): seq for key, seq in focus.items() if key[0].startswith(PAIR)}
        self.tell(with_messages(diagnoses, evidence, pairs) if pairs else diagnoses, evidence)

    def _notice(self) -> None:
        """Report findings of the guards immediately, not only after a hang."""
        flagged = self.host.flagged() + sum(there.flagged for there in self.together.remote())
        if flagged > self._flagged:
            self._flagged = flagged
            evidence = self.look()
            seen = {finding.kind for finding in evidence.findings}
            self.tell([d for d in diagnose(evidence) if d.kind in seen], evidence)

    def _keep_pace(self) -> None:
        """Warn about a rank that makes the others wait at every step, and withdraw the warning when it is over."""
        if self._closing or self.aborted or self.report.inconclusive or self.settings.on_slow is OnSlow.IGNORE:
            return
        if not self.pace.due(time.monotonic()):
            return
        if self._look_at_pace():  # among the findings of every look from now on, until it keeps pace again
            evidence = self.look()
            slow = [d for d in diagnose(evidence) if d.kind is Kind.STRAGGLER]
            self.tell([replace(d, proof=Proof.NOT_YET) for d in slow], evidence)

    def _look_at_pace(self, is_last: bool = False) -> bool:
        """Report what is new about the job's pace. Return whether a rank is newly named.

        Args:
            is_last: Whether the ranks have ended.
        """
        is_named = self.pace.look(self.host, lambda since: self.together.calls(self.host, since))
        for note in self.pace.new_notes([*self.host.readers.values()], is_last=is_last):
            self.report.say_note(note)
        if (steps := self.pace.steps(time.monotonic())) is not None:
            self.report.write_steps(steps)
        return is_named

    # Ranks that cannot go on ------------------------------------------------------------------------

    def _judge(self, moved: int) -> None:
        now = time.monotonic()
        if self._closing or self.aborted:
            return
        counts = self._counts()
        if moved or counts != self._last_counts:
            self._last_counts = counts
            self._still_since = now
        ended = self.host.ended()
        if self.host.gone() or any(there.ended for there in self.together.remote()):
            if self._first_death is None:
                self._first_death = now
                self._next_judgement = min(self._next_judgement, now + DEATH_SETTLE_S)
                self._delay = SETTLE_S
        waits = max([self.host.oldest_wait_s(), *(there.oldest_wait_s for there in self.together.remote())])
        stands_still = now - self._still_since > SETTLE_S
        blocked = waits > SETTLE_S and (stands_still or waits > self.settings.patience_s)
        dead = self._first_death is not None and now - self._first_death > DEATH_SETTLE_S
        quiet = min([self.host.quiet_s(), *(there.quiet_s for there in self.together.remote())])
        if not (blocked or dead or quiet > min(IDLE_S, self.settings.patience_s)):
            self._delay = SETTLE_S
            self._next_judgement = now if not dead else self._next_judgement
            return
        if now < self._next_judgement:
            return
        evidence = self.look()
        diagnoses, moving = self._judgement(evidence), not stands_still
        if self._premature(diagnoses, evidence):
            self._next_judgement = now + SETTLE_S
            return
        if diagnoses:
            # Twice the same, with nothing moving in between: rings are not read at one instant.
            time.sleep(0.1)
            self.host.read(self.together.route)
            self.together.step(self)
            same = {news_key(d) for d in self._judgement(self.look())}
            diagnoses = [d for d in diagnoses if news_key(d) in same]
            moving |= self._counts() != counts and not all(ended.values())
            if moving:
                diagnoses = self.report.unreported(among_moving(diagnoses, self.settings))
        if diagnoses and self._was_away() and self._next_judgement > time.monotonic():
            return  # it was stopped while it judged
        if diagnoses:
            self._with_stacks(diagnoses, moving)
        self._delay = min(self._delay * 1.5, 2.0)
        self._next_judgement = now + self._delay

    def _diagnose(self, evidence: Evidence) -> list[Diagnosis]:
        still_s = time.monotonic() - self._still_since
        return without_guesses(diagnose(evidence), self.settings, still_s, given_up(evidence))

    def _withdraw(self, at_the_end: bool = False) -> None:
        """Withdraw warnings that no longer apply, because the job has continued."""
        if self.aborted or self.together.has_leader or self._interrupted():
            return  # what a leader has said it withdraws itself
        if self.report.has_warnings_due(at_the_end):
            evidence = self.look()
            self.report.withdraw(diagnose(evidence), evidence)

    def _premature(self, diagnoses: Sequence[Diagnosis], evidence: Evidence) -> bool:
        """Return whether it is too early to report *diagnoses*.

        Either a rank is gone or stopped, no rank waits for it yet, and some are on their way to their next call; or
        level strict holds calls that contradict each other, and raises as soon as its threads run.
        """
        now = time.monotonic()
        if self.settings.level is Level.STRICT and any(d.ends_job and d.proof is Proof.MET for d in diagnoses):
            self._first_met = self._first_met or now
            if now - self._first_met <= RAISE_S:
                return True
        if self._is_being_ended(evidence):
            return True
        if not diagnoses or any(d.victims or (d.nobody_waits and d.ends_job) for d in diagnoses):
            self._first_found = None
            return False
        self._first_found = self._first_found or self._first_death or now
        running = any(state.phase is Phase.RUNNING for state in evidence.ranks.values())
        return running and now - self._first_found <= ON_THEIR_WAY_S

    def _is_being_ended(self, evidence: Evidence) -> bool:
        """Return whether a signal that all ranks got has ended some, and others die more slowly or save their state."""
        signals = {ended_by(state) for state in evidence.ranks.values()} - {None, "SIGKILL"}
        living = [state.pid for state in evidence.ranks.values() if state.phase in LIVING and state.pid is not None]
        if self._first_death is None or not signals or not living:
            return False
        has_grace = signals != {UNSEEN} and any(catches(pid, signal.SIGTERM) for pid in living)
        return time.monotonic() - self._first_death < (GRACE_S if has_grace else DYING_S)

    def _judgement(self, evidence: Evidence) -> list[Diagnosis]:
        if self._interrupted() or self.report.inconclusive:
            return []
        diagnoses = self._diagnose(evidence)
        if not any(d.exit_code for d in diagnoses):
            return [d for d in self.report.unreported(diagnoses) if d.victims or d.nobody_waits]
        return self.report.unreported(diagnoses)

    def _with_stacks(self, diagnoses: Sequence[Diagnosis], moving: bool) -> None:
        """Look once more with stacks, which stop the ranks for a moment, and say it."""
        if not any(d.exit_code or d.kind is Kind.HOST_STUCK for d in diagnoses):
            self.tell(diagnoses, self.look())
            return
        evidence = self.look(stacks=True)
        better = self._diagnose(evidence)
        if moving:
            better = among_moving(better, self.settings)
        better = self.report.unreported(better)
        self.tell(better or diagnoses, evidence)

    def _judges(self) -> bool:
        return self.together.judges(self.host)

    def _counts(self) -> tuple[int, ...]:
        """Return calls of every rank so far: while they stay the same, nothing moves."""
        return (*self.host.counts(), *(count for there in self.together.remote() for count in there.counts))

    def look(self, stacks: bool = False, focus: dict[Any, int] | None = None) -> Evidence:
        """Return the current evidence, of all hosts if there are several."""
        readers = list(self.host.readers.values())
        origin = origin_of(readers)
        evidence = self.look_here(stacks, focus, origin)
        self.together.add(evidence, self.host, stacks, focus or {}, origin)
        settle_stuck(evidence)
        evidence.findings = (*evidence.findings, *self.pace.findings())
        return evidence

    def look_here(self, stacks: bool, focus: dict[Any, int] | None, origin: int, ours_only: bool = False) -> Evidence:
        """Return this host's part of the evidence."""
        known = self.host.knowledge(self.settings)
        readers = [self.host.readers[rank] for rank in sorted(self.host.readers)]
        if stacks:
            evidence = build_evidence(readers, known, self.host.numbering)
            frozen = [r for r, s in evidence.ranks.items() if s.phase is Phase.FROZEN]
            living = [r for r in readers if evidence.ranks[r.number].phase in LIVING]
            silent = [r for r, s in evidence.ranks.items() if s.silent_s is not None]
            known.stacks = collect(living, frozen, self.host.notes, silent)
            self._children = child_stacks(living)
            self.host.activity.pass_over(self.host.readers)
            with contextlib.suppress(OSError):
                write_private(self.directory / "stacks.txt", as_text(known.stacks))
        seen = {reader.number: self._children.get(reader.number, (-1, ())) for reader in readers}
        known.children = {r.number: seen[r.number][1] for r in readers if seen[r.number][0] == r.count}
        extra = {} if ours_only else self.host.missing_states(self.host.readers)
        evidence = build_evidence(readers, known, self.host.numbering, extra, focus, origin)
        evidence.findings = findings(readers, evidence, origin)
        return evidence

    def accept(self, document: dict[str, Any]) -> None:
        """Adopt the leader's report."""
        self.report.accept(document)

    # What follows -----------------------------------------------------------------------------------

    def tell(self, diagnoses: Sequence[Diagnosis], evidence: Evidence) -> None:
        """Report new diagnoses, and act as --on-hang requires."""
        new = self.report.add(diagnoses, evidence)
        if any(d.ends_job for d in new) and not self.aborted:
            if self.settings.on_hang is OnHang.ABORT:
                self.abort()
            elif self.settings.on_hang is OnHang.REPORT and self._launcher is None:
                if any(state.phase in LIVING for state in evidence.ranks.values()):
                    self.report.say(left_alone(self.directory))  # under another launcher nothing ends the job

    def _show_places(self) -> None:
        """Print what was wrong when the job was interrupted, and the positions of the ranks, once."""
        if not self.report.places and self.host.readers:
            evidence = self.look(stacks=True)
            self.report.print_places(evidence)
            if self._judges() and not self.report.exit_code:
                self.report.add(verdict_before(evidence, None, diagnose), evidence)

    def abort(self) -> None:
        """End the ranks of this host: politely, then not."""
        self.aborted = True
        with contextlib.suppress(OSError):
            write_private(self.directory / "aborted.json", "{}")
        self.together.abort()
        end_ranks(self.host, self.grace_s)

    def _farewell(self) -> None:
        """Judge the remains after the end of all ranks, and remove the rings of a healthy job."""
        self.host.find(self.together.processes())
        self.host.read(self.together.route)
        self._compare()
        if not self._judges():
            self._withdraw(at_the_end=True)
            self.together.goodbye()
            return
        self._look_at_suspicions(math.inf)
        self._withdraw(at_the_end=True)
        ended_by_others = self.aborted or self._interrupted() or bool(self._closing and self.report.exit_code)
        if self.host.readers and not ended_by_others and not self.report.inconclusive:
            evidence = self.look()
            if not self._closing:
                self._judge_remains(evidence)
            self.report.say_late_ends(evidence)
        if self._interrupted() and not self.report.exit_code:
            self._show_places()
            self.report.save()
        elif not self.report.diagnoses:
            self.report.save()
        if self.settings.silent is not Silent.OFF and self.host.readers:
            self.report.silent = self._search_silent()
            self.report.save()
        self.report.finish()
        self.together.goodbye()
        if not self.report.diagnoses and self._ours():
            shutil.rmtree(self.directory, ignore_errors=True)

    def _judge_remains(self, evidence: Evidence) -> None:
        """Report what is wrong at the end of all ranks, and has not been reported yet."""
        seen = {(finding.kind, finding.site) for finding in evidence.findings}
        named = self.pace.named.keys() | set()
        if self.settings.on_slow is not OnSlow.IGNORE:
            self._look_at_pace(is_last=True)
        left = [*unwaited(evidence, written_out=True), *self.pace.findings()]
        evidence.findings = (*evidence.findings, *(f for f in left if (f.kind, f.site) not in seen))
        for recovery in recoveries(evidence):
            self.report.say(recovery.text)
        diagnoses = self.report.unreported(diagnose(evidence))
        diagnoses = [d for d in diagnoses if d.kind is not Kind.STRAGGLER or set(d.culprits) - named]
        if self.report.exit_code:
            diagnoses = []  # what died after the verdict died of it
        self.tell(diagnoses, evidence)

    def _search_silent(self) -> list[dict[str, Any]] | None:
        from distsim.debug.report.silent import search_silent

        rings = {rank: reader.path for rank, reader in self.host.readers.items()}
        return search_silent(rings, self.host.world_size, self.settings.silent_patterns, self.report.say)

    def _ours(self) -> bool:
        """Return whether distsim chose the folder, so that the rings of a healthy job are removed."""
        chosen = self.directory.parent in default_bases() and not self.settings.directory
        return chosen and not (self.directory / "launcher.json").exists()
