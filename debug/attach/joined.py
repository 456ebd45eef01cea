"""Evidence about a running job besides its stacks: Flight Recorder, PyTorch's debug server, NCCL RAS.

Each source is joined with the stacks (`join`), and a note says what it could not see. NCCL's RAS service (2.24 and
later) is queried over TCP: it answers in text, and since NCCL 2.28.7 also in JSON, which is requested first. Source of
the format: the page "RAS" of NCCL's documentation (docs.nvidia.com/deeplearning/nccl, troubleshooting), and the
service's source, src/ras.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import socket
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distsim.debug.attach.judge import Judged
from distsim.debug.attach.ranks import RankProcess, environment_of, with_descendants
from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.messages import are, capital, ranks_text
from distsim.debug.postmortem import Found, examine
from distsim.debug.records import CallWait
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError
from distsim.text.untrusted_input import MOST_RANKS, text, whole

__all__ = [
    "DEBUG_PORT",
    "PORT",
    "Joined",
    "RasCommunicator",
    "RasMember",
    "RasStatus",
    "ask_debug_server",
    "ask_flight_recorders",
    "ask_ras",
    "find_debug_server",
    "join",
    "read_status",
]

PORT = 28028
PROTOCOL = 2
CONNECT_S = 3.0
ANSWER_S = 12.0
"""The service waits up to 10 s for its peers."""
MOST_RAS_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RasMember:
    """A rank of a communicator as RAS describes it."""

    rank: int
    """Rank in the communicator."""
    pid: int | None = None
    host: str = ""
    why: str = ""
    """Reason why RAS has no data about the rank, such as `unresponsive` or `dead`."""


@dataclass(slots=True)
class RasCommunicator:
    """A communicator, and those of its members that differ from the others."""

    name: str
    """Hash of the communicator as in NCCL's log."""
    size: int | None = None
    counts: dict[str, dict[int, int]] = field(default_factory=dict)
    """Number of launches by operation and rank. RAS's text output contains only operations whose numbers differ."""
    members: dict[int, RasMember] = field(default_factory=dict)
    missing: list[RasMember] = field(default_factory=list)
    statuses: dict[int, str] = field(default_factory=dict)
    """Ranks whose state differs from that of most: INIT, FINALIZE, ABORT, NOCOMM, or an error."""

    def differing(self) -> dict[str, dict[int, int]]:
        """Return the operations whose number of launches differs between ranks."""
        return {op: counts for op, counts in self.counts.items() if len(set(counts.values())) > 1}

    def behind(self) -> dict[int, str]:
        """Return ranks that launched fewer operations than others, and the text about it; empty if the surplus of
        another operation explains it."""
        differing = self.differing()
        ranks = {rank for counts in differing.values() for rank in counts}
        # In text only outliers are listed by their numbers: who is not listed for an operation is one of the others.
        others = {op: next((n for rank, n in counts.items() if rank < 0), 0) for op, counts in differing.items()}
        totals = {rank: sum(counts.get(rank, others[op]) for op, counts in differing.items()) for rank in ranks}
        most = max(totals.values(), default=0)
        result = {}
        for rank in sorted(rank for rank, total in totals.items() if rank >= 0 and total < most):
            ops = [(op, counts.get(rank, others[op]), max(counts.values())) for op, counts in differing.items()]
            result[rank] = ", ".join(f"{count} of {top} {op}" for op, count, top in ops if count < top)
        return result


@dataclass(slots=True)
class RasStatus:
    """RAS status of a job."""

    version: str = ""
    communicators: list[RasCommunicator] = field(default_factory=list)
    processes: list[RasMember] = field(default_factory=list)
    """Processes of any communicator that do not answer RAS or that RAS considers dead."""
    timeouts: int = 0


def ask_ras(address: str, timeout_s: float = ANSWER_S) -> RasStatus:
    """Query the RAS service at HOST or HOST:PORT.

    Raises:
        UsageError: The port is closed, or another service answers.
    """
    host, port = _address(address)
    try:
        with socket.create_connection((host, port), CONNECT_S) as link:
            link.settimeout(timeout_s)
            lines = link.makefile("rb")
            greeting = _exchange(link, lines, f"CLIENT PROTOCOL {PROTOCOL}")
            if not greeting.upper().startswith("SERVER PROTOCOL "):
                raise UsageError(f"--ras {address}: expected NCCL's RAS service, got {greeting[:40]!r} as its greeting")
            _exchange(link, lines, "SET FORMAT json")  # an error before 2.28.7: it then answers in text
            link.sendall(b"VERBOSE STATUS\n")
            data = lines.read(MOST_RAS_BYTES)
    except OSError as error:
        raise UsageError(
            f"--ras {address}: no RAS service there ({error.strerror or error}); run it on a host of the job, with the "
            f"port of NCCL_RAS_ADDR (default {PORT}), NCCL 2.24 or later, and NCCL_RAS_ENABLE not 0"
        ) from None
    try:
        return read_status(data.decode(errors="replace"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--ras {address}: its answer cannot be read ({error}); the output of ncclras -v helps"
        ) from None


def read_status(answer: str) -> RasStatus:
    """Parse the answer, which is JSON or text. Raises ValueError, KeyError or TypeError if it is neither."""
    if answer.lstrip().startswith("{"):
        return _from_json(json.loads(answer))
    if "Communicators..." not in answer and "Job summary" not in answer:
        raise ValueError(f"expected the status of a job, got {answer.strip()[:60]!r}")
    return _from_text(answer)


def _address(address: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]+))(?::(\d{1,5}))?", address)
    if match is None or not 0 < (port := int(match[3] or PORT)) < 65536:
        raise UsageError(f"--ras: expected HOST or HOST:PORT, got {address!r}")
    return match[1] or match[2], port


def _exchange(link: socket.socket, lines: Any, request: str) -> str:
    link.sendall(f"{request}\n".encode())
    return str(lines.readline(4096).decode(errors="replace")).strip()


# -- JSON, since NCCL 2.28.7


def _from_json(data: Mapping[str, Any]) -> RasStatus:
    status = RasStatus(text(data["nccl_version"], "nccl_version"), timeouts=_int(data.get("ras", {}), "timeouts_count"))
    gone: dict[tuple[str, int | None], RasMember] = {}
    for one in data["communicators"]:
        communicator = RasCommunicator(text(one["hash"], "hash").removeprefix("0x"), whole(one["size"], "size"))
        for entry in one["ranks"]:
            member = _member(entry)
            communicator.members[member.rank] = member
            for op, count in entry.get("collective_counts", {}).items():
                communicator.counts.setdefault(text(op, "operation"), {})[member.rank] = whole(count, op, 0, 1 << 62)
            if state := _state(entry["status"]):
                communicator.statuses[member.rank] = state
        for entry in one["missing_ranks"]:
            reported = entry["status"]
            why = "dead" if reported.get("considered_dead") else "unresponsive" if reported.get("unresponsive") else ""
            member = _member(entry, why or "no member any more")
            communicator.missing.append(member)
            if why:
                gone[member.host, member.pid] = member
        status.communicators.append(communicator)
    status.processes = list(gone.values())
    return status


def _int(data: Mapping[str, Any], name: str) -> int:
    return whole(data.get(name, 0), name)


def _member(entry: Mapping[str, Any], why: str = "") -> RasMember:
    pid = whole(entry["pid"], "pid", -1)
    return RasMember(
        whole(entry["rank"], "rank", 0, MOST_RANKS), pid if pid > 0 else None, text(entry["host"], "host"), why
    )


def _state(status: Mapping[str, Any]) -> str:
    """Return the state in the text; empty for a running rank."""
    in_progress = 7  # ncclInProgress
    if status.get("abort_flag"):
        return "ABORT"
    if status.get("finalize_called") or status.get("destroy_flag"):
        return "FINALIZE"
    if (init := status.get("init_state", 0)) == in_progress:
        return "INIT"
    if init:
        return f"initialization error {init}"
    error = status.get("async_error", 0)
    return f"asynchronous error {error}" if error not in (0, in_progress) else ""


# -- Text, of every release

_HEADING = re.compile(r"#\d+-\d+ \((?:0x)?([0-9a-f]+)\) (\w+)")
_RANK = re.compile(r"Rank (\d+)(?P<said>[^-]*)-- (?:.*?managed by process (?P<pid>\d+) on node (?P<host>\S+))?")
_PROCESS = re.compile(r"Process (\d+) on node (\S+) managing")
_COUNT = re.compile(r"launched up to operation (\d+)|not launched any operations")
_STATUS = re.compile(r"status (\w+)")
_OPERATIONS = re.compile(r"different (\w+) operation counts")


def _from_text(answer: str) -> RasStatus:
    version = re.search(r"NCCL version ([\d.]+)", answer)
    status = RasStatus(version[1] if version else "")
    communicators: dict[str, RasCommunicator] = {}
    section, current, op, value = "", RasCommunicator(""), "", ""
    unlisted: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for line in map(str.strip, answer.splitlines()):
        if heading := _HEADING.match(line):
            current, section, op, value = (
                communicators.setdefault(heading[1], RasCommunicator(heading[1])),
                heading[2],
                "",
                "",
            )
        elif line in ("INCOMPLETE", "DEAD", "TIMEOUT"):
            section = line
        elif timeouts := re.match(r"Encountered (\d+) communication timeouts?", line):
            status.timeouts += int(timeouts[1])
        elif process := _PROCESS.match(line):
            why = "dead" if section == "DEAD" else "unresponsive"
            status.processes.append(RasMember(-1, int(process[1]), process[2], why))
        elif operations := _OPERATIONS.search(line):
            op, value = operations[1], ""
        elif "ranks have different status" in line:
            op, value = "status", ""
        elif several := re.match(r"(\d+) ranks have (.*)", line):
            value = several[2]
            if (counted := _COUNT.search(value)) and op != "status":
                unlisted[current.name, op].append((int(several[1]), int(counted[1] or 0)))
        elif missing := re.match(r"The missing ranks?: ([\d, -]+)", line):
            current.missing += [RasMember(rank, why="unresponsive") for rank in _numbers(missing[1])]
        elif rank := _RANK.match(line):
            _note_rank(current, section, op, rank["said"].strip() or value, _found_member(rank))
    _add_unlisted(communicators, unlisted)
    status.communicators = list(communicators.values())
    return status


def _found_member(match: re.Match[str]) -> RasMember:
    pid = match["pid"]
    return RasMember(whole(int(match[1]), "rank", 0, MOST_RANKS), int(pid) if pid else None, match["host"] or "")


def _note_rank(current: RasCommunicator, section: str, op: str, value: str, member: RasMember) -> None:
    current.members.setdefault(member.rank, member)
    if section == "INCOMPLETE":
        current.missing.append(RasMember(member.rank, member.pid, member.host, "unresponsive"))
    elif op == "status" and (state := _STATUS.search(value)):
        current.statuses[member.rank] = state[1]
    elif op and (counted := _COUNT.search(value)):
        current.counts.setdefault(op, {})[member.rank] = int(counted[1] or 0)
    elif section == "ERROR":
        current.statuses[member.rank] = value.strip().removeprefix("reported ") or "an error"


def _add_unlisted(
    communicators: Mapping[str, RasCommunicator], unlisted: Mapping[tuple[str, str], list[tuple[int, int]]]
) -> None:
    """Add entries for ranks that the text only counts, with numbers that no rank has."""
    for (name, op), groups in unlisted.items():
        counts = communicators[name].counts.setdefault(op, {})
        for number, count in groups:
            if list(counts.values()).count(count) < number:
                counts[-1 - len(counts)] = count


def _numbers(listed: str) -> Iterable[int]:
    """Return the numbers in a list such as `1-3,5`."""
    for part in re.findall(r"\d+(?:\s*-\s*\d+)?", listed):
        first, _, last = part.partition("-")
        yield from range(int(first), min(int(last or first), int(first) + MOST_RANKS) + 1)


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
    told_ns = time.time_ns()
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
    dumps = _await_dumps(dump_paths, told_ns)
    if silent := sorted(dump_paths.keys() - dumps.keys()):
        joined.notes.append(f"Flight Recorder: {ranks_text(silent)} wrote no dump in {DUMP_S:.0f} s")
    _judge({rank: path.read_bytes() for rank, path in dumps.items()}, joined, roots)
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
    stable = [one for one in status.communicators if _is_stuck(one, statuses)]
    by_pid = {state.pid: rank for rank, state in judged.evidence.ranks.items() if state.pid}
    gone = {by_pid[one.pid] for one in status.processes if one.pid in by_pid}
    sentences = [f"the process {one.pid} on {one.host} is {one.why}" for one in status.processes]
    culprits, members = set(gone), set()
    for comm in stable:
        for number, behind in comm.behind().items():
            member = comm.members.get(number)
            rank = None if member is None or member.pid is None else by_pid.get(member.pid)
            named = f"rank {rank}" if rank is not None else f"its rank {number}"
            sentences.append(f"in communicator {comm.name} {named} has launched {behind}")
            if rank is not None:
                culprits.add(rank)
        members |= {by_pid[member.pid] for member in comm.members.values() if member.pid in by_pid}
    if not sentences:
        text = f"NCCL RAS{_release(status)}: {len(status.communicators) or 'all'} communicators, no rank behind"
        return replace(judged, evidence=replace(judged.evidence, notes=[*judged.evidence.notes, text]))
    behind = f"NCCL RAS{_release(status)}: {'; '.join(sentences[:4])}{', ...' if len(sentences) > 4 else ''}."
    if judged.diagnoses:
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


def _is_stuck(comm: RasCommunicator, statuses: Sequence[RasStatus]) -> bool:
    """Return whether the ranks of the communicator differed in every reply."""
    alike = [one for status in statuses for one in status.communicators if one.name == comm.name]
    return bool(comm.behind()) and len(alike) == len(statuses) and all(one.counts == comm.counts for one in alike)


def _release(status: RasStatus) -> str:
    return f" (NCCL {status.version})" if status.version else ""
