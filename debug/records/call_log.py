"""Stores the last calls of one rank, and sums over all earlier ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from distsim.debug.records.call import CallRecord, Group
from distsim.debug.records.obligations import CREATIONS

Span = tuple[float, float]
Alike = tuple[Group, str, str, str, int | None, int, int]
"""Group, operation, first dtype, device, peer, and two figures that only sizes of about the same order share."""
KEPT, MOST_KEPT, LEAST_KEPT = 1 << 21, 4_000, 500
"""Number of calls that are stored: of all ranks together, and at most and at least of one rank.

A call takes about 430 bytes.
"""
_ALWAYS_KEPT = CREATIONS | {"init_process_group"}
"""Operations whose records are always kept: they are few, and define the groups."""


def window(num_ranks: int) -> int:
    """Return how many calls are kept for each of this many ranks."""
    return max(LEAST_KEPT, min(MOST_KEPT, KEPT // num_ranks))


@dataclass(slots=True)
class CallSum:
    """Sums over equal calls that have completed."""

    first: CallRecord
    count: int = 0
    nbytes: int = 0
    time_s: float = 0.0
    """Seconds from the last arrival to the end."""


@dataclass(slots=True)
class CallLog:
    """Calls in program order. Older calls are summed up and dropped, except open ones and those with an unwaited
    handle."""

    keep: int | None = None
    """Minimum number of stored calls (the maximum is a quarter more); None for all."""
    last: list[CallRecord] = field(default_factory=list)
    count: int = 0
    """Total number of calls."""
    sums: dict[Alike, CallSum] = field(default_factory=dict)
    """Sums of the calls that are not in `last`."""
    _left: list[CallRecord] = field(default_factory=list)
    """Calls that are already summed and still stored: at most `keep`, apart from calls that create groups."""
    _moved_s: float = 0.0
    """Seconds in which a summed call transferred bytes."""
    _spans: list[Span] = field(default_factory=list)
    """Periods in which summed calls transferred bytes, and which may overlap with calls in `last`."""

    def add(self, record: CallRecord, now_s: float) -> None:
        """Add the rank's next call. No call moves data before *now_s*."""
        record.index = self.count
        self.count += 1
        last = self.last
        last.append(record)
        if self.keep is not None and len(last) > self.keep + self.keep // 4:
            self._forget(now_s)

    @property
    def is_cut(self) -> bool:
        """Return whether some call is not in `kept`."""
        return self.count > len(self.last) + len(self._left)

    def kept(self) -> list[CallRecord]:
        """Return all remaining records, by number."""
        left = [record for record in self._left if _stays(record)]
        return sorted([*left, *self.last], key=lambda record: record.index) if left else self.last

    def together(self) -> Iterator[CallSum]:
        """Yield sums of all completed calls: first the earlier ones, then those of `last` one by one."""
        yield from self.sums.values()
        for record in self.last:
            if record.started_s is not None and record.completed_s is not None:
                yield CallSum(record, 1, record.nbytes, record.completed_s - record.started_s)

    def moving_s(self) -> float:
        """Return the time in seconds in which at least one call transferred bytes."""
        rest_s, _ = _union((*self._spans, *_spans(self.last)), float("inf"))
        return self._moved_s + rest_s

    def _forget(self, now_s: float) -> None:
        assert self.keep is not None
        old = self.last[: -self.keep]
        done = [record for record in old if record.done]
        self.last[: -self.keep] = [record for record in old if not record.done]
        for record in done:
            self._sum_up(record)
        since_s = min((r.started_s for r in self.last if r.started_s is not None), default=now_s)
        moved_s, self._spans = _union((*self._spans, *_spans(done)), min(since_s, now_s))
        self._moved_s += moved_s
        left = [record for record in (*self._left, *done) if _stays(record)]
        handles = [record for record in left if record.op not in _ALWAYS_KEPT]
        if len(handles) > self.keep:  # a program that never waits: the oldest are forgotten as any others
            oldest_kept = handles[-self.keep].index
            left = [record for record in left if record.op in _ALWAYS_KEPT or record.index >= oldest_kept]
        self._left = left

    def _sum_up(self, record: CallRecord) -> None:
        if record.started_s is None or record.completed_s is None:
            return
        nbytes = record.nbytes
        order = nbytes.bit_length(), max(0, nbytes - 1).bit_length()
        dtype = record.dtypes[0] if record.dtypes else ""
        key = (record.group, record.op, dtype, record.device, record.peer, *order)
        summed = self.sums.get(key)
        if summed is None:
            summed = self.sums[key] = CallSum(record)
        summed.count += 1
        summed.nbytes += nbytes
        summed.time_s += record.completed_s - record.started_s


def _stays(record: CallRecord) -> bool:
    return record.op in _ALWAYS_KEPT or (record.is_async and not record.waited)


def _spans(records: Sequence[CallRecord]) -> list[Span]:
    return [(r.started_s, r.completed_s) for r in records if r.started_s is not None and r.completed_s is not None]


def _union(spans: Iterable[Span], until_s: float) -> tuple[float, list[Span]]:
    """Return seconds up to *until_s* that at least one of *spans* covers; and what they cover later."""
    total, end_s = 0.0, float("-inf")
    later: list[Span] = []
    for begin, finish in sorted(spans):
        if finish > until_s:
            later.append((max(begin, until_s), finish))
            finish = until_s
        if finish > end_s and begin < finish:
            total += finish - max(begin, end_s)
            end_s = finish
    return total, later
