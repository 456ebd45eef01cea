"""Reads traces of torch's profiler and matches the communication of all ranks.

Events are decoded one after the other from a file of any size, and only those of the device are kept. A kernel is
communication if its name begins with nccl or rccl in any case (ncclKernel_, ncclDevKernel_). Which of them belong
together is said by the arguments `Process Group Name` and `Seq`, else by the group, the operation and the order; traces
of torch before 2.3 have no group names and are matched only if all ranks have the same operations in the same order.

Source of the arguments' names: torch/csrc/distributed/c10d/ParamCommsUtils.hpp; distsim's own traces have the same.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from distsim.errors import UsageError
from distsim.text.units import plural
from distsim.text.untrusted_input import MOST_RANKS, brief, open_regular, printable

CHUNK = 1 << 20
LONGEST_EVENT = 16 << 20
"""Characters of one event; a longer one is damage."""
PROGRESS_S = 5.0
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
TOGETHER = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Operations in which each member needs every other, so that they end together and give the offset of a clock."""
MESSAGES = ("send", "recv", "sendrecv", "unknown")
"""Operations whose partner the trace does not name."""
_LIST = re.compile(r'"traceEvents"\s*:\s*\[')
_RANK = re.compile(r'"distributedInfo"\s*:\s*\{[^{}\[]*?"rank"\s*:\s*(\d+)')
_FILE_RANK = re.compile(r"rank[-_.]?(\d+)|(?:^|[-_.])(\d+)(?=\.(?:pt\.trace\.)?json)", re.IGNORECASE)
_STEP = re.compile(r"ProfilerStep#?(\d+)")
_KERNEL = re.compile(r"AllReduce|AllGather|ReduceScatter|AllToAll|Broadcast|Reduce|SendRecv", re.IGNORECASE)
_GZIP = 31
"""Window bits by which zlib reads gzip files."""
_SPACES = re.compile(r"[\s,]*")
_OPS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
}  # fmt: skip
_BYTES = {
    "Half": 2, "BFloat16": 2, "Float": 4, "Double": 8, "Char": 1, "Byte": 1, "Short": 2, "Int": 4, "Long": 8,
    "Bool": 1, "ComplexFloat": 8, "ComplexDouble": 16, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip


@dataclass(eq=False, slots=True)
class TracedKernel:
    """One kernel or copy of a device; times in seconds."""

    name: str
    begun_s: float
    ended_s: float


@dataclass(frozen=True)
class TracedGroup:
    """A process group as traces name it."""

    name: str
    """Empty in traces of torch before 2.3."""
    ranks: tuple[int, ...]
    """Members, empty if the trace does not have them."""
    label: str


@dataclass(eq=False, slots=True)
class TracedComm:
    """One communication kernel of one rank."""

    begun_s: float
    ended_s: float
    op: str
    """Operation as torch names it (all_reduce, all_gather, ...), however the trace spells it."""
    group: TracedGroup
    seq: int | None
    nbytes: int
    records: tuple[TracedMeeting, ...] = ()
    """The meeting that the kernel is part of; none if it could not be matched."""


@dataclass(eq=False, slots=True)
class TracedMeeting:
    """The kernels of one collective on all ranks that have a trace."""

    op: str
    group: TracedGroup
    comms: dict[int, TracedComm]
    started_s: float = 0.0
    """Time at which the last rank came."""
    peer: int | None = None

    @property
    def last(self) -> int:
        """Return the rank that came last."""
        return max(self.comms, key=lambda rank: (self.comms[rank].begun_s, -rank))


@dataclass
class TraceOfRank:
    """The device's part of one rank's trace."""

    rank: int
    file: str
    origin_us: float | None = None
    """Time in the file that is 0 here: microseconds since 1970 leave seconds too few digits."""
    kernels: list[TracedKernel] = field(default_factory=list)
    comms: list[TracedComm] = field(default_factory=list)
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Begin and end of each step of the profiler, on the host."""
    device_steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The same on the device, where the trace has it."""

    @property
    def items(self) -> list[TracedKernel | TracedComm]:
        """Return everything that ran on the device."""
        return [*self.kernels, *self.comms]


@dataclass
class JobTrace:
    """Traces of the ranks of a job, on one clock."""

    ranks: dict[int, TraceOfRank]
    meetings: list[TracedMeeting]
    notes: list[str]


def read_folder(folder: Path) -> JobTrace:
    """Read all traces in a folder (`*.json`, `*.json.gz`, one a rank), and match them.

    Raises:
        UsageError: There is no trace, or two of one rank.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: expected a folder with a trace of each rank (rank0.json, rank1.json.gz, ...)")
    paths = sorted(path for path in folder.iterdir() if path.name.endswith((".json", ".json.gz")))
    traces: dict[int, TraceOfRank] = {}
    notes: list[str] = []
    origin_us: float | None = None
    for path in paths:
        number = next((int(one or two) for one, two in _FILE_RANK.findall(path.name)), 0 if len(paths) == 1 else -1)
        trace = TraceOfRank(number, path.name, origin_us)
        if (reason := _read(trace, path, notes)) is not None:
            notes.append(f"{path.name}: left out: {reason}")
            continue
        origin_us = trace.origin_us
        if trace.rank in traces:
            raise UsageError(
                f"{folder}: two traces of rank {trace.rank} ({traces[trace.rank].file}, {trace.file}): expected one job"
            )
        traces[trace.rank] = trace
    if not traces:
        why = f" ({notes[0]})" if notes else ""
        raise UsageError(
            f"{folder}: no trace with kernels in {plural(len(paths), 'file')} named *.json or *.json.gz{why}"
        )
    meetings = _match(traces, notes)
    _align(traces, meetings)
    for meeting in meetings:
        meeting.started_s = max(comm.begun_s for comm in meeting.comms.values())
        for comm in meeting.comms.values():
            comm.records = (meeting,)
    known = {rank for meeting in meetings for rank in meeting.group.ranks}
    if missing := sorted(known - traces.keys()):
        shown = ",".join(map(str, missing[:8])) + ("..." if len(missing) > 8 else "")
        notes.append(f"no trace of {plural(len(missing), 'rank')} ({shown}): when they came is not known")
    return JobTrace(dict(sorted(traces.items())), meetings, notes)


def _read(trace: TraceOfRank, path: Path, notes: list[str]) -> str | None:
    """Fill *trace* from a file. Return why it is left out, or None; *notes* gets a line if the file is damaged."""
    try:
        with open_regular(path) as raw:
            reader = _EventReader(raw, path)
            for event in reader:
                _take(trace, event)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    if rank := _RANK.search(reader.head):
        trace.rank = int(rank[1])
    if reader.damage:
        notes.append(f"{path.name}: {reader.damage}; {reader.events} events before it are used")
    trace.comms.sort(key=lambda comm: comm.begun_s)
    if not trace.items:
        return "it has no kernels"
    return None if 0 <= trace.rank < MOST_RANKS else "neither its distributedInfo nor its name has a rank"


class _EventReader:
    """Decodes the events of one file, one after the other."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        self.head = ""
        """Text before the events."""
        self.damage = ""
        self.events = 0
        self._raw = raw
        self._unzip = zlib.decompressobj(_GZIP) if path.name.endswith(".gz") else None
        self._tail = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._path = path
        self._said_s = time.monotonic()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        decoder, buffer, at, is_list = json.JSONDecoder(), "", 0, False
        while True:
            chunk = self._read()
            buffer, at = buffer[at:] + chunk, 0
            if not is_list:
                start = _LIST.search(buffer)
                if start is None:
                    if not chunk or len(buffer) > LONGEST_EVENT:
                        self.damage = self.damage or "not a trace: it has no traceEvents"
                        return
                    continue
                self.head, at, is_list = buffer[: start.start()], start.end(), True
            while True:
                at = _SPACES.match(buffer, at).end()  # type: ignore[union-attr]
                if buffer.startswith("]", at):
                    return
                try:
                    event, end = decoder.raw_decode(buffer, at)
                except (ValueError, RecursionError):
                    break  # the rest of the event is in the next chunk
                at = end
                if isinstance(event, dict):
                    self.events += 1
                    yield event
            if not chunk or len(buffer) - at > LONGEST_EVENT:
                self.damage = self.damage or "it is cut off or damaged"
                return

    def _read(self) -> str:
        """Return the next characters; empty at the end, and where the file is damaged."""
        data = b""
        while not data and not self.damage:
            packed = self._tail or self._raw.read(CHUNK)
            if self._unzip is None:
                data = packed
                break
            if not packed:
                self.damage = "" if self._unzip.eof else "it is cut off or damaged"
                break
            try:
                data = self._unzip.decompress(packed, CHUNK)
            except zlib.error as error:
                self.damage = f"it is cut off or damaged ({error})"
            self._tail = self._unzip.unconsumed_tail or self._unzip.unused_data
            if self._unzip.eof and self._tail:
                self._unzip = zlib.decompressobj(_GZIP)  # several gzip files in a row are one
        if time.monotonic() - self._said_s > PROGRESS_S:
            self._said_s = time.monotonic()
            done, size = self._raw.tell() >> 20, self._path.stat().st_size >> 20
            print(f"distsim: {brief(self._path.name)}: {done} of {size} MiB read", file=sys.stderr)
        return self._decoder.decode(data)


def _take(trace: TraceOfRank, event: dict[str, Any]) -> None:
    """Keep an event of the device, or a step."""
    category, name, args = event.get("cat"), event.get("name"), event.get("args")
    begin, duration = event.get("ts"), event.get("dur", 0)
    if event.get("ph") != "X" or not isinstance(name, str):
        return
    if not isinstance(begin, (int, float)) or not isinstance(duration, (int, float)):
        return
    if trace.origin_us is None:
        trace.origin_us = begin
    begun_s = (begin - trace.origin_us) / 1e6
    ended_s = begun_s + max(duration, 0) / 1e6
    args = args if isinstance(args, dict) else {}
    if category == "user_annotation" and (step := _STEP.match(name)):
        trace.steps[int(step[1])] = begun_s, ended_s
    elif category == "gpu_user_annotation" and (step := _STEP.match(name)):
        known = trace.device_steps.get(int(step[1]), (begun_s, ended_s))  # one for each stream
        trace.device_steps[int(step[1])] = min(known[0], begun_s), max(known[1], ended_s)
    elif category in DEVICE:
        if name.lower().startswith(("nccl", "rccl")):
            trace.comms.append(_comm(name, args, begun_s, ended_s))
        else:
            trace.kernels.append(TracedKernel(printable(brief_name(name)), begun_s, ended_s))


def brief_name(name: str) -> str:
    """Return a kernel's name without its template arguments and the suffix of distsim's kinds: `mm`, `gemm_kernel`."""
    return re.sub(r"^void ", "", re.split(r"[<(\[]", name, maxsplit=1)[0]).strip()[:60] or name[:60]


def _comm(name: str, args: dict[str, Any], begun_s: float, ended_s: float) -> TracedComm:
    def text(key: str) -> str:
        value = args.get(key, "")
        return printable(value) if isinstance(value, str) else ""

    def whole(key: str) -> int | None:
        value = args.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None

    op = text("Collective name").strip("_").lower().replace("_", "").replace("base", "").replace("coalesced", "")
    if not op or op == "unknown":
        kernel = _KERNEL.search(name)
        op = kernel[0].lower() if kernel else "unknown"
    op = next((known for start, known in _OPS.items() if op.startswith(start)), op)
    listed = text("Process Group Ranks")
    members = tuple(map(int, re.findall(r"\d{1,9}", listed)))
    is_whole = "..." not in listed and len(set(members)) == len(members) <= MOST_RANKS
    group_name, label = text("Process Group Name")[:100], text("Process Group Description")[:100]
    label = (label if label not in ("", "undefined") else group_name) or "all ranks"
    elements = whole("Out msg nelems" if op == "all_gather" else "In msg nelems") or 0
    group = TracedGroup(group_name, members if is_whole else (), label)
    return TracedComm(begun_s, ended_s, op, group, whole("Seq"), elements * _BYTES.get(text("dtype"), 0))


def _match(traces: dict[int, TraceOfRank], notes: list[str]) -> list[TracedMeeting]:
    """Return the collectives, each with its kernels on all ranks that have a trace."""
    by_key: dict[tuple[Any, ...], dict[int, TracedComm]] = defaultdict(dict)
    nameless = {rank: tuple(comm.op for comm in trace.comms if not comm.group.name) for rank, trace in traces.items()}
    is_guess = len(set(nameless.values())) == 1
    if any(nameless.values()):
        guess = "taken for calls of all ranks, in their order"
        refusal = "and differ between ranks: they cannot be matched (torch 2.3 and later write the group)"
        notes.append(f"communication kernels have no process group: {guess if is_guess else refusal}")
    for trace in traces.values():
        # Without numbers the order within a step: a rank's profiler may have begun a step earlier.
        first_s = min((span[0] for span in trace.steps.values()), default=float("-inf"))
        counts: dict[tuple[TracedGroup, str], int] = defaultdict(int)
        for comm in trace.comms:
            if not comm.group.name and is_guess and comm.op == "sendrecv":
                comm.op = "all_to_all"  # NCCL's kernel for it
            is_early = comm.seq is None and comm.group.name and comm.begun_s < first_s
            if comm.op in MESSAGES or is_early or not (comm.group.name or is_guess):
                continue
            counts[comm.group, comm.op] += 1
            number = counts[comm.group, comm.op] if comm.seq is None or not comm.group.name else comm.seq
            by_key[comm.group, comm.seq is None and comm.op, number].setdefault(trace.rank, comm)
    meetings = []
    for comms in by_key.values():
        first = next(iter(comms.values()))
        if len(comms) > 1 and len({comm.op for comm in comms.values()}) == 1:  # else `distsim diagnose` says so
            group = replace(first.group, ranks=first.group.ranks or tuple(sorted(traces)))
            meetings.append(TracedMeeting(first.op, group, comms))
    unmatched = sum(len(trace.comms) for trace in traces.values()) - sum(len(one.comms) for one in meetings)
    if unmatched and len(traces) > 1:
        notes.append(f"{unmatched} communication kernels are messages, or have no partner in another trace")
    return sorted(meetings, key=lambda one: min(comm.begun_s for comm in one.comms.values()))


def _align(traces: dict[int, TraceOfRank], meetings: Sequence[TracedMeeting]) -> None:
    """Put all ranks on one clock: ends of a collective differ by the offset of the clocks, in the median."""
    offsets: dict[int, list[float]] = defaultdict(list)
    for meeting in meetings:
        if meeting.op in TOGETHER:
            middle_s = median(comm.ended_s for comm in meeting.comms.values())
            for rank, comm in meeting.comms.items():
                offsets[rank].append(comm.ended_s - middle_s)
    for rank, several in offsets.items():
        offset_s = median(several)
        trace = traces[rank]
        for item in trace.items:
            item.begun_s -= offset_s
            item.ended_s -= offset_s
        for steps in (trace.steps, trace.device_steps):
            steps.update({step: (begin - offset_s, end - offset_s) for step, (begin, end) in steps.items()})
