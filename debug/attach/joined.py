"""Evidence about a running job besides its stacks: Flight Recorder, PyTorch's debug server, NCCL RAS.

Each source is joined with the stacks (`join`), and a note says what it could not see.
"""

from __future__ import annotations

import contextlib
import html
import os
import re
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from distsim.debug.attach.judge import Judged
from distsim.debug.attach.ranks import RankProcess, environment_of, with_descendants
from distsim.debug.attach.ras import RasCommunicator, RasStatus
from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.messages import are, capital, ranks_text
from distsim.debug.postmortem import Found, examine
from distsim.debug.records import CallWait
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError
from distsim.text.untrusted_input import read_bytes

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMP_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
DUMP_S = 6.0
"""ProcessGroupNCCL looks at its pipe once a second, then writes."""
DEBUG_PORT = 25999
"""Default of torch.distributed.debug.start_debug_server."""
PAGE_S = 10.0
MOST_BYTES = 256 << 20
PAGES = ("fr_trace_json", "fr_trace_nccl_json")
"""Pages of the debug server with the records of CPU groups and of ProcessGroupNCCL."""


@dataclass
class Joined:
    """Data from other services of the job."""

    records: Found | None = None
    """Result of reading Flight Recorder's dumps."""
    source: str = ""
    """Origin of the dumps, as the end of a sentence."""
    ras: Sequence[RasStatus] = ()
    """Two replies, from before and after the stacks were sampled."""
    notes: list[str] = field(default_factory=list)


# -- Flight Recorder, by its pipe


def ask_flight_recorders(processes: Iterable[RankProcess], roots: Sequence[Path] | None = None) -> Joined:
    """Let every rank with a Flight Recorder pipe write its dump, and judge the dumps."""
    dump_paths: dict[int, list[Path]] = {}
    deaf: list[int] = []
    asked_ns = time.time_ns()
    for process in processes:
        if process.rank is None:
            continue
        environ = environment_of(process.pid)
        if stem := environ.get(PIPE, ""):
            if _write_to_pipe(f"{stem}{process.rank}.pipe"):
                dump_paths[process.rank] = [Path(f"{prefix}{process.rank}") for prefix in _prefixes(environ)]
            else:
                deaf.append(process.rank)
    joined = Joined(source=f"dumps that attach asked for through {PIPE}")
    if deaf:
        joined.notes.append(f"Flight Recorder: {ranks_text(deaf)} did not open the pipe of {PIPE}")
    if not dump_paths:
        return joined
    dumps = _await_dumps(dump_paths, asked_ns)
    if silent := sorted(dump_paths.keys() - dumps.keys()):
        joined.notes.append(f"Flight Recorder: {ranks_text(silent)} wrote no dump in {DUMP_S:.0f} s")
    read: dict[int, bytes] = {}
    for rank, path in dumps.items():
        try:
            read[rank] = read_bytes(path, MOST_BYTES)
        except OSError as error:
            joined.notes.append(f"Flight Recorder: the dump of rank {rank} cannot be read ({error.strerror})")
    _judge(read, joined, roots)
    return joined


def _write_to_pipe(name: str) -> bool:
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        os.write(descriptor, b"1")
    os.close(descriptor)
    return True


def _prefixes(environ: Mapping[str, str]) -> list[str]:
    """Return the path prefixes of dumps of a rank with this environment."""
    chosen = [environ[name] for name in DUMP_FILES if environ.get(name)]
    home = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/tmp')}/.cache"
    positions = (f"{home}/torch/comm_lib_trace_rank_", "/tmp/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_")
    return chosen or list(positions)


def _await_dumps(dump_paths: Mapping[int, Sequence[Path]], since_ns: int) -> dict[int, Path]:
    """Return each rank's dump that was written after the request, once it has stopped growing."""
    dumps: dict[int, Path] = {}
    sizes: dict[int, int] = {}
    deadline = time.monotonic() + DUMP_S
    while len(dumps) < len(dump_paths) and time.monotonic() < deadline:
        for rank, positions in dump_paths.items():
            for path in positions if rank not in dumps else ():
                with contextlib.suppress(OSError):
                    status = path.stat()
                    if status.st_mtime_ns >= since_ns - 1_000_000_000 and status.st_size:
                        if sizes.get(rank) == status.st_size:
                            dumps[rank] = path
                        sizes[rank] = status.st_size
        time.sleep(0.1)
    return dumps


def _judge(dumps: Mapping[int, bytes], joined: Joined, roots: Sequence[Path] | None) -> None:
    if not dumps:
        return
    with tempfile.TemporaryDirectory(prefix="distsim-dumps-") as folder:
        for rank, data in dumps.items():
            (Path(folder) / f"trace_rank_{rank}").write_bytes(data)
        try:
            joined.records = examine(Path(folder), roots)
        except UsageError as error:
            joined.notes.append(f"Flight Recorder: {str(error).partition(': ')[2]}")
            return
        joined.notes += [f"Flight Recorder: {complaint}" for complaint in joined.records.complaints]


# -- torch.distributed.debug's server


def find_debug_server(processes: Iterable[RankProcess]) -> str:
    """Return HOST:PORT of the debug server that a rank of this host runs on the default port; empty if there is
    none.
    """
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for words in map(str.split, Path(table).read_text().splitlines()[1:]):
                if words[1].endswith(f":{DEBUG_PORT:04X}") and words[3] == "0A":  # LISTEN
                    inodes.add(f"socket:[{words[9]}]")
    if not inodes:
        return ""
    for pid in with_descendants(process.pid for process in processes):
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(descriptor.readlink()) in inodes:
                        return f"localhost:{DEBUG_PORT}"
    return ""


def ask_debug_server(address: str, roots: Sequence[Path] | None = None) -> Joined:
    """Read the records that the server at HOST:PORT gathers from all ranks, and judge them."""
    match = re.fullmatch(r"(?:(.+):)?(\d{1,5})", address)
    if match is None:
        raise UsageError(f"--debug-server: expected PORT or HOST:PORT, got {address!r}")
    host = match[1] or "localhost"
    joined = Joined(source=f"torch.distributed.debug at {host}:{match[2]}")
    dumps: dict[int, bytes] = {}
    for page in PAGES:
        try:
            with urllib.request.urlopen(f"http://{host}:{match[2]}/{page}", timeout=PAGE_S) as answer:
                text = answer.read(MOST_BYTES).decode(errors="replace")
        except (OSError, ValueError) as error:
            joined.notes.append(f"debug server: no {page} from {host}:{match[2]} ({getattr(error, 'reason', error)})")
            continue
        for rank, body in re.findall(r"<h2>Rank (\d+): [^<]*</h2>\s*<pre>(.*?)</pre>", text, re.DOTALL):
            data = html.unescape(body)
            if '"entries": [\n' in data or int(rank) not in dumps:  # of two recorders the one that has something
                dumps[int(rank)] = data.encode()
        failed = re.findall(r"<h2>Rank (\d+): [^<]*</h2>\s*<p>Failed", text)
        if failed and page == PAGES[0]:
            joined.notes.append(f"debug server: {ranks_text(map(int, failed))} did not answer it")
    _judge(dumps, joined, roots)
    return joined


# -- All of it together


def join(judged: Judged, joined: Joined) -> Judged:
    """Join the diagnoses: records before stacks, stacks before RAS alone."""
    notes = [*judged.evidence.notes, *joined.notes]
    judged = replace(judged, evidence=replace(judged.evidence, notes=notes))
    if judged.running:
        return judged  # records of ranks that move on are open at any moment
    records = joined.records
    if records is not None and any(not diagnosis.is_warning for diagnosis in records.diagnoses):
        judged = _with_records(judged, records, joined.source)
    elif records is not None:
        notes.append(f"Flight Recorder: nothing is wrong in {joined.source}")
    return _with_ras(judged, joined.ras) if joined.ras else judged


def _with_records(judged: Judged, records: Found, source: str) -> Judged:
    """Return the verdict based on the records, with the stacks added."""
    for rank, state in records.evidence.ranks.items():
        stacked = judged.evidence.ranks.get(rank)
        if stacked is None:
            continue
        state.stack, state.pid = stacked.stack or state.stack, stacked.pid
        for wait in state.waits:  # gloo's records have no lines
            if isinstance(wait, CallWait) and wait.record.site is None:
                wait.record.site, wait.record.stack = stacked.site, stacked.stack
                state.site = stacked.site
    sources = {**judged.evidence.sources, **records.evidence.sources}
    evidence = replace(records.evidence, sources=sources, notes=judged.evidence.notes)
    first, *others = diagnose(evidence) or records.diagnoses
    diagnoses = [replace(first, explanation=f"{first.explanation} By {source}."), *others]
    return Judged(diagnoses, evidence)


def _with_ras(judged: Judged, statuses: Sequence[RasStatus]) -> Judged:
    status = statuses[-1]
    stable = (one for one in status.communicators if _is_stuck(one, statuses))
    by_pid = {state.pid: rank for rank, state in judged.evidence.ranks.items() if state.pid}
    gone = {by_pid[one.pid] for one in status.processes if one.pid in by_pid}
    facts = ras_facts(statuses, by_pid)
    sentences = [text for text, _ in facts]
    culprits = {*gone, *(rank for _, rank in facts if rank is not None)}
    members = {by_pid[one.pid] for comm in stable for one in comm.members.values() if one.pid in by_pid}
    says = f"{'; '.join(sentences[:4])}{', ...' if len(sentences) > 4 else ''}."
    behind = f"NCCL RAS{_release(status)}: "
    behind += says if sentences else f"{len(status.communicators) or 'all'} communicators, no rank behind"
    if sentences and judged.diagnoses:
        first, *others = judged.diagnoses
        return replace(judged, diagnoses=[replace(first, explanation=f"{first.explanation} {behind}"), *others])
    if not culprits:
        return replace(judged, evidence=replace(judged.evidence, notes=[*judged.evidence.notes, behind]))
    diagnosis = Diagnosis(
        Kind.PROCESS_FROZEN if gone else Kind.MISSING_RANK,
        tuple(sorted(culprits)),
        tuple(sorted((members or judged.evidence.ranks.keys()) - culprits)),
        sites={rank: state.site for rank, state in judged.evidence.ranks.items() if state.site is not None},
        explanation=f"{capital(ranks_text(culprits))} {are(culprits, 'is', 'are')} behind. {behind} The counts "
        "did not change between two samples.",
        suggestion="Look at the stacks of these ranks: they are before the call that the others wait in.",
    )
    return replace(judged, diagnoses=[diagnosis], inconclusive=None)


def ras_facts(statuses: Sequence[RasStatus], by_pid: Mapping[int, int]) -> list[tuple[str, int | None]]:
    """Return what all replies agree on: processes that do not answer, and ranks that are behind; each with its rank.

    Args:
        statuses: Replies, the last one at the end.
        by_pid: Ranks by process, as far as known.
    """
    status = statuses[-1]
    facts = [
        (f"the process {one.pid} on {one.host} is {one.why}", by_pid.get(one.pid or 0)) for one in status.processes
    ]
    for comm in status.communicators:
        for number, behind in comm.behind().items() if _is_stuck(comm, statuses) else ():
            member = comm.members.get(number)
            rank = None if member is None or member.pid is None else by_pid.get(member.pid)
            named = f"rank {rank}" if rank is not None else f"its rank {number}"
            facts.append((f"in communicator {comm.name} {named} has launched {behind}", rank))
    return facts


def _is_stuck(comm: RasCommunicator, statuses: Sequence[RasStatus]) -> bool:
    """Return whether the ranks of the communicator differed in every reply."""
    alike = [one for status in statuses for one in status.communicators if one.name == comm.name]
    return bool(comm.behind()) and len(alike) == len(statuses) and all(one.counts == comm.counts for one in alike)


def _release(status: RasStatus) -> str:
    return f" (NCCL {status.version})" if status.version else ""
