"""Records of NCCL's Inspector: the time of each collective on each rank's device.

Files hold one JSON object a line. Header and metadata are in each line, or, with later releases, in a line before those
of a communicator. A rank in it is one of the communicator; that of the job is the rank in the largest communicator of
the process.

Source: github.com/NVIDIA/nccl, ext-profiler/inspector/README.md (output format v4.0).
"""

from __future__ import annotations

import gzip
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from distsim.debug.diagnosis.pace.durations import TimedCall
from distsim.debug.records import Group
from distsim.text.codec import Rank, Whole
from distsim.text.units import plural
from distsim.text.untrusted_input import MOST_RANKS, brief, open_regular

OPS = {"AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}
OPS |= {"AlltoAll": "all_to_all"}
MOST_CALLS = 100_000
"""Last calls of a process that are kept."""
LONGEST_LINE = 1 << 16
SUFFIXES = (".log", ".json", ".jsonl", ".gz")
MARKS = (b'"coll_perf"', b'"inspector_output_format_version"')
HOST_TIME = "collective_cpu"
"""Source of a time that is not the device's."""


class _Header(Struct):
    id: str
    rank: Rank
    n_ranks: Whole


class _Metadata(Struct):
    hostname: str = "?"
    pid: Whole = 0
    dump_timestamp_us: Whole = 0


class _Collective(Struct):
    coll: str
    coll_sn: Whole
    coll_exec_time_us: float
    coll_msg_size_bytes: Whole = 0
    coll_timing_source: str = ""


class _Line(Struct):
    header: _Header | None = None
    metadata: _Metadata | None = None
    coll_perf: _Collective | None = None


Process = tuple[str, int]
_Call = tuple[str, int, _Collective, int]
"""Communicator, rank in it, record, when it was written in microseconds."""


def inspector_logs(directory: Path) -> list[Path]:
    """Return the files in a folder, and in those in it, that the Inspector has written."""
    paths = sorted(path for pattern in ("*", "*/*") for path in directory.glob(pattern) if path.suffix in SUFFIXES)
    return [path for path in paths if path.is_file() and any(mark in _first(path) for mark in MARKS)]


def read_inspector(paths: Sequence[Path]) -> tuple[dict[int, list[TimedCall]], dict[int, str], list[str]]:
    """Return the calls by rank, the host of each rank, and a line for each file that is damaged.

    Raises:
        ValueError: The records are of more ranks than one job has, or of two jobs.
    """
    calls: dict[Process, deque[_Call]] = defaultdict(lambda: deque(maxlen=MOST_CALLS))
    sizes: dict[str, int] = {}
    complaints: list[str] = []
    for path in paths:
        try:
            _read(path, calls, sizes)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            complaints.append(f"{path.name}: damaged, what is before it counts ({brief(str(error), 100)})")
    members: dict[str, dict[int, Process]] = defaultdict(dict)
    for process, several in calls.items():
        for communicator, rank, _, _ in several:
            if members[communicator].setdefault(rank, process) != process:
                raise ValueError(f"rank {rank} of communicator {communicator} is two processes: two jobs in one folder")
    world = max(members, key=lambda one: (sizes[one], len(members[one])), default="")
    if sizes.get(world, 0) > MOST_RANKS:
        raise ValueError(f"a job of {sizes[world]} ranks")
    numbers = {process: rank for rank, process in members[world].items()}
    if others := [process for process in calls if process not in numbers]:
        raise ValueError(f"process {others[0][1]} on {others[0][0]} is not in the largest communicator: another job")
    groups = {
        communicator: Group(communicator, "", tuple(numbers[of[rank]] for rank in sorted(of)))
        for communicator, of in members.items()
        if len(of) == sizes[communicator]
    }
    timed = {
        numbers[process]: [_timed(call, groups[call[0]]) for call in several if call[0] in groups]
        for process, several in calls.items()
    }
    missing = {name: size - len(members[name]) for name, size in sizes.items() if len(members[name]) < size}
    if missing:
        lacking = plural(max(missing.values()), "rank")
        complaints.append(f"left out: {plural(len(missing), 'communicator')}, without records of up to {lacking}")
    return timed, {rank: process[0] for process, rank in numbers.items()}, complaints


def _timed(call: _Call, group: Group) -> TimedCall:
    _, _, record, written_us = call
    op = OPS.get(record.coll, record.coll)
    number = record.coll, record.coll_sn  # each operation of a communicator has its own numbers
    return TimedCall(group, number, op, record.coll_msg_size_bytes, record.coll_exec_time_us / 1e6, written_us / 1e6)


def _read(path: Path, calls: dict[Process, deque[_Call]], sizes: dict[str, int]) -> None:
    decoder = msgspec.json.Decoder(_Line)
    header: _Header | None = None
    metadata = _Metadata()
    for text in _lines(path):
        line = decoder.decode(text)
        header, metadata = line.header or header, line.metadata or metadata
        record = line.coll_perf
        if header is None or record is None or record.coll_timing_source == HOST_TIME:
            continue
        sizes[header.id] = max(sizes.get(header.id, 0), header.n_ranks)
        key = metadata.hostname, metadata.pid
        calls[key].append((header.id, header.rank, record, metadata.dump_timestamp_us))


def _lines(path: Path) -> Iterator[bytes]:
    with _opened(path) as file:
        while text := file.readline(LONGEST_LINE):
            if text.strip():
                yield text


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with open_regular(path) as raw:
        yield gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw


def _first(path: Path) -> bytes:
    try:
        with _opened(path) as file:
            return bytes(file.readline(LONGEST_LINE))
    except (OSError, EOFError, zlib.error):
        return b""
