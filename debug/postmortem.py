"""Diagnosis of a folder of flight records: rings or Flight Recorder dumps, also damaged ones."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.diagnosis.pace.durations import durations_pace
from distsim.debug.diagnosis.pace.job import JobPace, outlook_text, slow_finding, slow_text
from distsim.debug.diagnosis.silent.facts import SilentFinding
from distsim.debug.evidence.from_dumps import Dump, NotADump, dump_evidence, named_rank, read_dump, timed_calls
from distsim.debug.evidence.from_inspector import inspector_logs, read_inspector
from distsim.debug.evidence.guard_flags import findings
from distsim.debug.evidence.processes import Numbering, has_ended, number_processes, number_readers
from distsim.debug.evidence.rank_state import Knowledge, build_evidence, ended_state, exits_by_number, read_exits
from distsim.debug.messages import after_the_end, ranks_text
from distsim.debug.monitor.straggler_watch import slow_findings
from distsim.debug.records import Evidence, Finding, Phase, RankState
from distsim.debug.records.diagnosis import Diagnosis, diagnoses_from_json
from distsim.debug.report.rank_states import MARKER, Inconclusive, inconclusive, interruption
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import facts_path, verdict_path
from distsim.debug.rings.reader import RingReader, origin_of
from distsim.debug.settings import Settings
from distsim.errors import UsageError
from distsim.text.codec import convert
from distsim.text.output_files import no_folder
from distsim.text.units import plural
from distsim.text.untrusted_input import read_json

T = TypeVar("T")

OURS = (
    "verdict.",
    "launcher.json",
    "done.json",
    "aborted.json",
    MARKER,
    "monitor.",
    "ask.",
    "answer.",
    "exit.",
    "forked.",
    "stacks.txt",
)
"""Beginnings of the names of files that launcher and monitor leave beside the rings."""


@dataclass
class Found:
    """The diagnoses, the evidence on which they rest, and a line for each irregularity."""

    diagnoses: list[Diagnosis]
    evidence: Evidence
    complaints: list[str] = field(default_factory=list)
    inconclusive: Inconclusive | None = None
    """Reason why the absence of diagnoses does not mean that the job was healthy."""
    silent: list[SilentFinding] | None = None
    """Findings of silent faults; None if the ranks recorded none of the facts for them."""
    judged: bool = True
    """Whether the job's own monitor has judged it, or all its ranks have ended. Stragglers of a running job are not
    reported.
    """
    pace: list[str] = field(default_factory=list)
    """What times on the device show of the ranks' pace."""


@dataclass
class Job:
    """Rings of one job, one for each rank."""

    name: str
    readers: list[RingReader]
    complaints: list[str]
    numbering: Numbering = field(default_factory=Numbering)

    @property
    def began_ns(self) -> int:
        """Return when its last rank started, by the wall clock."""
        return max(_opened(reader) for reader in self.readers)

    @property
    def text(self) -> str:
        """Return the job as text."""
        began = datetime.fromtimestamp(self.began_ns / 1e9).strftime("%Y-%m-%d %H:%M:%S")
        ranks = self.numbering.size
        return f"job {self.name} ({plural(ranks, 'rank')}, began {began})"


def examine(directory: Path, roots: Sequence[Path] | None = None) -> Found:
    """Diagnose a folder; if it has several jobs, the newest.

    The records name files. Their lines are read only from files under *roots* (default: the working folder), because
    records from elsewhere could name any file of the reader.

    Raises:
        UsageError: The folder contains nothing to diagnose.
    """
    if not directory.is_dir():
        raise UsageError(f"expected a folder of flight records, got {directory}: {no_folder(directory)}")
    jobs, complaints = load_jobs(directory)
    if jobs:
        notes = [*complaints, *_left_out(jobs), *jobs[0].complaints]
        return _examine_job(directory, jobs, jobs[0], notes, roots)
    return _examine_dumps(directory, complaints, roots)


def examine_jobs(directory: Path, roots: Sequence[Path] | None = None) -> tuple[list[tuple[Job, Found]], list[str]]:
    """Judge each job that left rings in a directory, the newest first, and report damaged files."""
    jobs, complaints = load_jobs(directory)
    judged: list[tuple[Job, Found]] = []
    for job in jobs:
        try:
            judged.append((job, _examine_job(directory, jobs, job, job.complaints, roots)))
        except UsageError as mistake:
            complaints.append(f"{job.text}: {mistake}")
    if jobs and not judged:
        raise UsageError(f"{directory}: {'; '.join(complaints[:5])}")
    return judged, complaints


def _examine_job(
    directory: Path, jobs: Sequence[Job], job: Job, complaints: list[str], roots: Sequence[Path] | None
) -> Found:
    # The launcher, who leaves exit codes, clears the folder first: its job is the oldest.
    exits = read_exits(directory) if job is jobs[-1] else {}
    result = _from_rings(directory, job, complaints, exits, _roots(roots))
    _search_silent(job, result)
    return result


def _search_silent(job: Job, examined: Found) -> None:
    """Check the facts that the ranks recorded of their training, if they did and the job has ended."""
    rings = {reader.number: reader.path for reader in job.readers}
    if examined.judged and any(facts_path(ring).exists() for ring in rings.values()):
        from distsim.debug.diagnosis.silent.judge import search  # numpy: not for every job

        result = search(rings, job.numbering.size, Settings.read().silent_patterns)
        examined.silent = result.findings
        examined.complaints += result.notes


def _roots(given: Sequence[Path] | None) -> list[Path]:
    return [Path.cwd()] if given is None else list(given)


def _examine_dumps(directory: Path, complaints: list[str], roots: Sequence[Path] | None) -> Found:
    if logs := inspector_logs(directory):
        return _from_inspector(directory, logs, complaints)
    dumps, refused, more = _load_dumps(directory)
    if dumps:
        known = {*refused, *(dump.rank for dump in dumps)}
        result = _judged(dumps, lambda some: _from_dumps(some, known, _roots(roots)), more, lambda dump: dump.path.name)
        result.complaints = [*complaints, *more, *(note for note in result.evidence.notes if note.startswith("no "))]
        return result
    if not complaints and not more and any(path.name.startswith(OURS) for path in directory.iterdir()):
        raise UsageError(
            f"{directory}: no rank has come to init_process_group (files of the launcher or the monitor are here, "
            "but no rank*.ring)"
        )
    reasons = "; ".join([*complaints, *more][:5])
    raise UsageError(
        f"{directory}: no records here, neither rings of distsim (rank*.ring) nor Flight Recorder dumps"
        + (f" ({reasons})" if reasons else "; they are where --rings, DISTSIM_DIR or TORCH_FR_DUMP_TEMP_FILE said")
    )


def _from_dumps(dumps: Sequence[Dump], known: Collection[int], roots: Sequence[Path]) -> Found:
    evidence = dump_evidence(dumps, known, roots)
    diagnoses = diagnose(evidence)
    pace: list[str] = []
    if not any(d.exit_code for d in diagnoses):
        slow, pace = _pace(*durations_pace(timed_calls(dumps, evidence)))
        evidence.findings = (*evidence.findings, *slow)
        diagnoses = diagnose(evidence) if slow else diagnoses
    return Found(diagnoses, evidence, inconclusive=inconclusive(diagnoses, evidence, dumps=True), pace=pace)


def _from_inspector(directory: Path, logs: Sequence[Path], complaints: list[str]) -> Found:
    """Judge the pace of a job by the records of NCCL's Inspector, which say nothing of a hang."""
    try:
        calls, hosts, more = read_inspector(logs)
    except ValueError as error:
        raise UsageError(f"{directory}: records of NCCL's Inspector: {error}") from None
    slow, pace = _pace(*durations_pace(calls, hosts))
    ranks = {rank: RankState(rank, host=hosts[rank]) for rank in calls}
    evidence = Evidence(max(calls, default=-1) + 1, ranks, findings=slow)
    return Found(diagnose(evidence), evidence, [*complaints, *more], pace=pace)


def _pace(job: JobPace, unmatched: int) -> tuple[list[Finding], list[str]]:
    """Return the slow ranks of a job by times on the device, and lines about what these show."""
    slow = [slow_finding(one, group, None) for one, (group, _) in job.slow_ranks().values() if one.is_sure]
    lines = [f"pace: {slow_text(one)}" for one, _ in job.slow_ranks().values() if not one.is_sure]
    lines += [note.text for note in job.notes()]
    outlook = job.outlook()
    if outlook is not None:
        lines.append(f"pace: {outlook_text(outlook[1])}")
    if unmatched:
        lines.append(f"left out: {plural(unmatched, 'call')} that not all ranks have recorded")
    return slow, lines


def load_jobs(directory: Path) -> tuple[list[Job], list[str]]:
    """Return the jobs whose rings are in a folder, the newest first, and notes on faulty files."""
    complaints: list[str] = []
    readers_of: dict[str, list[RingReader]] = defaultdict(list)
    for path in sorted(directory.glob("*.ring")):
        try:
            reader = RingReader(path)
        except UsageError as error:
            complaints.append(str(error))
            continue
        readers_of[reader.header.job].append(reader)
    jobs = []
    for name, readers in readers_of.items():
        job = Job(name, *_last_attempt(readers))
        job.numbering = number_processes([reader.process for reader in job.readers])
        job.readers = number_readers(job.readers, job.numbering)
        job.complaints += job.numbering.doubles
        if job.readers:
            jobs.append(job)
        else:
            complaints += job.complaints
    return sorted(jobs, key=lambda job: (-job.began_ns, job.name)), complaints


def load_rings(directory: Path, name: str = "") -> tuple[list[RingReader], list[str]]:
    """Return the rings of one job in a folder (by default the newest), and notes on faulty ones."""
    jobs, complaints = load_jobs(directory)
    if not jobs:
        return [], complaints
    chosen = next((job for job in jobs if job.name == name), None) if name else jobs[0]
    if chosen is None:
        raise UsageError(f"{directory}: no job {name} here; there are {', '.join(job.name for job in jobs)}")
    return chosen.readers, [*complaints, *([] if name else _left_out(jobs)), *chosen.complaints]


def _left_out(jobs: Sequence[Job]) -> list[str]:
    return [
        f"two jobs in one folder: {plural(len(job.readers), 'ring')} of job {job.name} left out, job {jobs[0].name} is "
        "newer; give each job its own folder"
        for job in jobs[1:]
    ]


def _last_attempt(readers: Sequence[RingReader]) -> tuple[list[RingReader], list[str]]:
    """Return the rings of the last attempt."""
    attempt = max(reader.header.attempt for reader in readers)
    chosen = [reader for reader in readers if reader.header.attempt == attempt]
    # Rings of an earlier run under the same name: that rank ended before this run began.
    start = max(_opened(reader) for reader in chosen)
    earlier = [r for r in chosen if r.word(rings.W_BEAT) + r.header.wall_offset_ns < start - 60_000_000_000]
    complaints = [f"{reader.path.name}: of an earlier run, left out" for reader in earlier]
    return [reader for reader in chosen if reader not in earlier], complaints


def _opened(reader: RingReader) -> int:
    return reader.word(rings.W_OPENED) + reader.header.wall_offset_ns


def _from_rings(
    directory: Path,
    job: Job,
    complaints: list[str],
    exits: Mapping[tuple[int, int], int],
    roots: Sequence[Path],
) -> Found:
    readers, numbering = job.readers, job.numbering
    alive = not all(has_ended(reader.header.pid, reader.header.start_ticks) for reader in readers)
    known = Knowledge(exits=exits, directory=directory, hang_after_s=0.0, post_mortem=not alive, roots=roots)
    known.now_ns = time.monotonic_ns() if alive else max(reader.word(rings.W_BEAT) for reader in readers)
    aborted = (directory / "aborted.json").exists()
    if aborted:  # our own signals ended those who still lived
        known.exits = {key: code for key, code in known.exits.items() if code not in (-15, -9)}
    missing = _missing(readers, numbering.size)
    if missing:
        complaints.append(f"no ring of {ranks_text(missing)} (the job had {numbering.size})")

    def judge(some: Sequence[RingReader]) -> Found:
        extra = _without_ring(some, known, numbering)
        evidence = build_evidence(some, known, numbering, extra)
        evidence.findings = findings(some, evidence, origin_of(some))
        evidence.unrecorded = frozenset(rank for rank, state in extra.items() if state.exit_code is None)
        if damaged := next((reader for reader in some if reader.damage), None):
            raise ValueError(damaged.damage)
        stored, places = read_verdict(directory, some[0].header.job)
        if places and not any(d.exit_code for d in stored):
            return Found(stored, evidence, complaints, interruption(places))
        diagnoses = stored or diagnose(evidence)
        if stored and not alive and not any(d.exit_code for d in stored):  # the monitor may have ended before the ranks
            again = diagnose(evidence)
            diagnoses = again if any(d.exit_code for d in again) else stored
        if not any(d.exit_code for d in diagnoses) and (slow := slow_findings(some)):
            evidence.findings = (*evidence.findings, *slow)
            diagnoses = diagnose(evidence)
        unsure = inconclusive(diagnoses, evidence, dumps=False)
        complaints.extend(() if diagnoses else after_the_end(evidence.ranks.values()))
        return Found(diagnoses, evidence, complaints, unsure, judged=bool(stored) or not alive)

    return _judged(readers, judge, complaints, lambda reader: reader.path.name)


def _judged(
    sources: Sequence[T], judge: Callable[[Sequence[T]], Found], complaints: list[str], name: Callable[[T], str]
) -> Found:
    """Return the judgement of *sources*; if one is inconsistent, of the others, with a note on each that is left
    out.
    """
    try:
        return judge(sources)
    except Exception:
        good: list[T] = []
    for source in sources:
        try:
            judge([source])
        except Exception as error:
            complaints.append(f"{name(source)}: damaged, left out ({_reason(error)})")
        else:
            good.append(source)
    try:
        return judge(good)
    except Exception as error:
        notes = "; ".join(complaints[:5])
        raise UsageError(f"the records contradict each other ({type(error).__name__}); {notes}") from None


def _reason(error: Exception) -> str:
    """Return the message of an error about a value; other errors are summarized as damage."""
    return str(error) if type(error) is ValueError and str(error) else f"{type(error).__name__} in its content"


def _missing(readers: Sequence[RingReader], world_size: int) -> list[int]:
    present = {reader.number for reader in readers}
    return [rank for rank in range(world_size) if rank not in present]


def _without_ring(readers: Sequence[RingReader], known: Knowledge, numbering: Numbering) -> dict[int, RankState]:
    codes = exits_by_number(known.exits, numbering, max(reader.header.attempt for reader in readers))
    joined = any(reader.word(rings.W_JOINED) for reader in readers)
    phase = Phase.RUNNING if joined else Phase.ABSENT
    return {
        rank: ended_state(rank, codes[rank]) if rank in codes else RankState(rank, phase)
        for rank in _missing(readers, numbering.size)
    }


def read_verdict(directory: Path, job: str) -> tuple[list[Diagnosis], list[str]]:
    """Return the monitor's verdict on this job, which saw more than the records show, and the ranks' positions at an
    interrupt.
    """
    for path in (verdict_path(directory, job), directory / "verdict.json"):
        try:
            content = read_json(path)
            if content.get("job", job) == job:
                return diagnoses_from_json(content), convert(content.get("interrupted", ()), list[str])
        except (OSError, ValueError, KeyError, AttributeError):
            continue
    return [], []


def _load_dumps(directory: Path) -> tuple[list[Dump], set[int], list[str]]:
    """Return the dumps, the ranks of unreadable files with similar names, and a line for each of these."""
    dumps: dict[int, Dump] = {}
    bad: list[Path] = []
    complaints: list[str] = []
    for path in sorted(p for p in directory.iterdir() if p.is_file() and not p.name.startswith(OURS)):
        try:
            dump = read_dump(path)
        except UsageError as error:
            if isinstance(error, NotADump) and named_rank(path) is None:
                continue  # any other file: a dump's name has its rank
            complaints.append(str(error))
            bad.append(path)
            continue
        except Exception as error:
            bad.append(path)
            complaints.append(f"{path.name}: damaged, left out ({_reason(error)})")
            continue
        if dump.rank in dumps:
            complaints.append(f"{path.name}: a second dump of rank {dump.rank}, left out")
            continue
        dumps[dump.rank] = dump
    alike = {re.sub(r"\d+", "#", dump.path.name) for dump in dumps.values()}
    refused = {
        rank for path in bad if re.sub(r"\d+", "#", path.name) in alike and (rank := named_rank(path)) is not None
    }
    return [dumps[rank] for rank in sorted(dumps)], refused - set(dumps), complaints
