"""Who came last and why, what was exposed, bandwidth, critical path, regressions.

A collective's transfer begins when its last rank has come. The ranks before it wait; its own time since its previous
collective says why it came last: longer computation, longer communication of other groups (it waited itself), or
nothing on the device (the host launched late).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from statistics import median
from typing import Any

from distsim.calibration.traces.kineto import JobTrace, TracedMeeting, TraceOfRank
from distsim.errors import UsageError
from distsim.network.bench import busbw_factor, expected_interval
from distsim.network.critical_path import PathPart, Ran, critical_path

OPS = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter"}
OPS |= {"all_to_all": "alltoall"}
"""Operations in which each rank waits for every other and sends bytes, with nccl-tests' names."""
WHY = {"compute": "its kernels take longer", "communication": "it waits in other groups", "host": "launched late"}
Span = tuple[float, float]


@dataclass
class OpRow:
    """All calls of one operation on one group."""

    group: str
    op: str
    calls: int = 0
    waited_s: float = 0.0
    """Sum over the calls of how long the median of the other ranks waited for the last one."""
    moved_s: float = 0.0
    """Sum of the transfers after the last arrival."""
    nbytes: int = 0
    weighed: float = 0.0
    """Bytes times nccl-tests' factor from algorithm to bus bandwidth."""
    busbw_GBps: float | None = None
    expected_GBps: tuple[float, float] | None = None
    """Interval of 8 of 10 measured bandwidths on the given cluster."""
    exposed_s: float = 0.0
    """Time that no computation hid, mean of the ranks."""
    last: dict[int, int] = field(default_factory=dict)
    """How often each rank came last, the most frequent first."""
    caused_s: dict[int, float] = field(default_factory=dict)
    """Waiting that each rank caused, the largest first."""
    why_s: dict[int, dict[str, float]] = field(default_factory=dict)
    """For each rank that caused waiting, seconds by `WHY` beyond the median of the others."""


@dataclass
class RankTimes:
    """The device's time of one rank."""

    rank: int
    span_s: float
    compute_s: float
    exposed_s: float
    idle_s: float
    """Nothing was on the device: the host had launched nothing."""


@dataclass
class Regression:
    """A kernel that takes longer than in the other traces, in seconds of a step of one rank."""

    name: str
    before_s: float
    after_s: float


@dataclass
class Answers:
    """Everything that is said of one job's traces."""

    ops: list[OpRow]
    ranks: list[RankTimes]
    step: int | None
    """Step of the critical path; None if the traces have no steps and the path is over all."""
    path_s: float
    path: list[PathPart]


def answer(job: JobTrace, cluster: Any = None) -> Answers:
    """Evaluate the traces of a job; *cluster*: a `Cluster` with the bandwidths to expect, if one is given."""
    busy = {rank: _union((item.begun_s, item.ended_s) for item in trace.kernels) for rank, trace in job.ranks.items()}
    ops = _rows(job, busy)
    if cluster is not None:
        _expect(job, ops, cluster)
    step, path_s, path = _path(job)
    return Answers(ops, [_times(trace, busy[rank]) for rank, trace in job.ranks.items()], step, path_s, path)


def _rows(job: JobTrace, busy: Mapping[int, list[Span]]) -> list[OpRow]:
    rows: dict[tuple[str, str], OpRow] = {}
    before: dict[int, float] = {}
    others = {rank: _union((comm.begun_s, comm.ended_s) for comm in trace.comms) for rank, trace in job.ranks.items()}
    for meeting in job.meetings:
        key = meeting.group.label, meeting.op
        row = rows.setdefault(key, OpRow(*key))
        row.calls += 1
        row.exposed_s += sum(
            comm.ended_s - comm.begun_s - _overlap(busy[rank], (comm.begun_s, comm.ended_s))
            for rank, comm in meeting.comms.items()
        ) / len(job.ranks)
        if meeting.op in OPS:
            moved_s = max(median(comm.ended_s for comm in meeting.comms.values()) - meeting.started_s, 0.0)
            row.moved_s += moved_s
            nbytes = max(comm.nbytes for comm in meeting.comms.values())
            row.nbytes += nbytes
            row.weighed += nbytes * busbw_factor(OPS[meeting.op], len(meeting.group.ranks))
            _blame(row, meeting, before, busy, others)
        for rank, comm in meeting.comms.items():
            before[rank] = max(before.get(rank, 0.0), comm.ended_s)
    for row in rows.values():
        if row.moved_s > 0.0 and row.weighed:
            row.busbw_GBps = row.weighed / row.moved_s / 1e9
        row.last = dict(sorted(row.last.items(), key=lambda one: (-one[1], one[0])))
        row.caused_s = dict(sorted(row.caused_s.items(), key=lambda one: (-one[1], one[0])))
    return sorted(rows.values(), key=lambda row: (-row.waited_s - row.exposed_s, row.group, row.op))


def _blame(
    row: OpRow, meeting: TracedMeeting, before: Mapping[int, float], busy: Mapping[int, list[Span]],
    others: Mapping[int, list[Span]],
) -> None:  # fmt: skip
    """Count who came last, how long the others waited for it, and what it did meanwhile beyond the others."""
    last = meeting.last
    waited_s = meeting.started_s - median(comm.begun_s for rank, comm in meeting.comms.items() if rank != last)
    row.waited_s += waited_s
    row.last[last] = row.last.get(last, 0) + 1
    row.caused_s[last] = row.caused_s.get(last, 0.0) + waited_s
    if not all(rank in before for rank in meeting.comms):
        return
    spent = {}
    for rank, comm in meeting.comms.items():
        span = before[rank], comm.begun_s
        compute_s, inside_s = _overlap(busy[rank], span), _overlap(others[rank], span)
        spent[rank] = {"compute": compute_s, "communication": inside_s}
        spent[rank]["host"] = max(0.0, span[1] - span[0] - compute_s - inside_s)
    reasons = row.why_s.setdefault(last, dict.fromkeys(WHY, 0.0))
    for reason in WHY:
        usual_s = median(spent[rank][reason] for rank in spent if rank != last)
        reasons[reason] += max(0.0, spent[last][reason] - usual_s)


def _union(spans: Iterable[Span]) -> list[Span]:
    """Return the time that the spans cover, in order and without overlaps."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _overlap(spans: Sequence[Span], span: Span) -> float:
    """Return how much of *span* the ordered *spans* cover."""
    total = 0.0
    for begin, end in spans[max(0, bisect_left(spans, span) - 1) :]:
        if begin >= span[1]:
            break
        total += max(0.0, min(end, span[1]) - max(begin, span[0]))
    return total


def _times(trace: TraceOfRank, compute: Sequence[Span]) -> RankTimes:
    items = trace.items
    begin, end = min(item.begun_s for item in items), max(item.ended_s for item in items)
    compute_s = sum(last - first for first, last in compute)
    covered_s = sum(last - first for first, last in _union([(item.begun_s, item.ended_s) for item in items]))
    return RankTimes(trace.rank, end - begin, compute_s, covered_s - compute_s, end - begin - covered_s)


def _path(job: JobTrace) -> tuple[int | None, float, list[PathPart]]:
    """Return the critical path of the last step that all ranks have, or of everything, and its length."""
    items = {rank: trace.items for rank, trace in job.ranks.items()}
    spans = {
        rank: (min(item.begun_s for item in some), max(item.ended_s for item in some)) for rank, some in items.items()
    }
    step = max(set.intersection(*(set(trace.steps) for trace in job.ranks.values())), default=None)
    if step is not None:
        spans = {rank: _on_device(trace, step) or spans[rank] for rank, trace in job.ranks.items()}
    rank = max(spans, key=lambda one: (spans[one][1], -one))
    begin, end = spans[rank]
    parts, from_s = critical_path({number: Ran(some) for number, some in items.items()}, rank, begin, end)
    return step, end - from_s, parts


def _on_device(trace: TraceOfRank, step: int) -> Span | None:
    """Return the span of a step on the device: its annotation there, or else the kernels that begin in the host's."""
    if step in trace.device_steps:
        return trace.device_steps[step]
    begin, end = trace.steps[step]
    within = [item for item in trace.items if begin <= item.begun_s < end]
    return (begin, max(item.ended_s for item in within)) if within else None


def _expect(job: JobTrace, rows: Sequence[OpRow], cluster: Any) -> None:
    """Set the bandwidths that eight of ten measurements on *cluster* would have, by its model and interval."""
    slots = list(cluster.place(None, None))
    most = max(max(meeting.group.ranks) for meeting in job.meetings) if job.meetings else 0
    if most >= len(slots):
        raise UsageError(
            f"--on {cluster.name}: it has {len(slots)} GPUs, but the traces are of rank {most}: give more nodes (:N)"
        )
    prices: dict[tuple[str, int, tuple[int, ...]], Span] = {}
    sums: dict[tuple[str, str], Span] = {}
    for meeting in job.meetings:
        nbytes = max(comm.nbytes for comm in meeting.comms.values())
        if meeting.op not in OPS or not nbytes:
            continue
        op, ranks = OPS[meeting.op], meeting.group.ranks
        key = op, nbytes, ranks
        if key not in prices:
            around = expected_interval(op, cluster, nbytes, ranks)
            prices[key] = (nan, nan) if around is None else (around.low_s, around.high_s)
        low_s, high_s = sums.get((meeting.group.label, meeting.op), (0.0, 0.0))
        sums[meeting.group.label, meeting.op] = low_s + prices[key][0], high_s + prices[key][1]
    for row in rows:
        low_s, high_s = sums.get((row.group, row.op), (nan, nan))
        if row.busbw_GBps is not None and low_s > 0.0:
            row.expected_GBps = row.weighed / high_s / 1e9, row.weighed / low_s / 1e9


def regressions(job: JobTrace, other: JobTrace) -> list[Regression]:
    """Return the kernels that take longer a step than in *other*, the largest difference first.

    Raises:
        UsageError: The traces have different numbers of ranks.
    """
    if len(job.ranks) != len(other.ranks):
        raise UsageError(
            f"--against: expected traces of {len(job.ranks)} ranks, got {len(other.ranks)}: compare runs of one size"
        )
    after, before = _by_name(job), _by_name(other)
    rows = [Regression(name, before.get(name, 0.0), after.get(name, 0.0)) for name in after.keys() | before.keys()]
    rows.sort(key=lambda row: (row.before_s - row.after_s, row.name))
    return rows


def _by_name(job: JobTrace) -> dict[str, float]:
    """Return seconds by kernel, of a step of one rank: transfers and waiting apart."""
    totals: dict[str, float] = defaultdict(float)
    steps = max(1, min(len(trace.steps) for trace in job.ranks.values()))
    for trace in job.ranks.values():
        for kernel in trace.kernels:
            totals[kernel.name] += kernel.ended_s - kernel.begun_s
        for comm in trace.comms:
            started_s = (
                min(max(comm.records[0].started_s, comm.begun_s), comm.ended_s) if comm.records else comm.begun_s
            )
            totals[f"{comm.op} (transfer)"] += comm.ended_s - started_s
            totals[f"{comm.op} (waiting)"] += started_s - comm.begun_s
    return {name: seconds / steps / len(job.ranks) for name, seconds in totals.items()}
