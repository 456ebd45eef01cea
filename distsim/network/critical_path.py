"""Critical path of a step over all ranks, from its end back.

Before an item comes always what had to be over for it to begin. On the device: the kernel that ran just before; where a
communication kernel ran alone, its bytes; where it waited, what its last member did before it came; where nothing ran,
the host. Kernels beside each other count as one path, the one whose kernel began last. A simulated device remembers its
last kernels only: a path may begin later than its step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

EPSILON_S = 1e-9
"""Difference in seconds up to which two times count as equal, because of rounding."""
MOST_MOVES = 500_000


@dataclass(slots=True)
class PathPart:
    """Time that the critical path of a step spent on one thing."""

    kind: str
    """compute, communication or host."""
    name: str
    time_s: float


def operator_name(operator: Any) -> str:
    """Return an operator's short name: `mm`, not `aten::mm.default`."""
    packet = getattr(operator, "overloadpacket", None)
    return str(operator) if packet is None else str(packet).removeprefix("aten.")


class Ran:
    """Kernels of one rank's GPUs, searchable by time; complete from *since_s* on.

    Items have `begun_s` and `ended_s`. Those of computation have a `name`; those of communication have `records` with
    `op`, `group`, `peer` and `started_s`, the time at which the last member had come.
    """

    def __init__(self, items: Sequence[Any], since_s: float = float("-inf")) -> None:
        self.since_s = since_s
        done = [item for item in items if item.begun_s is not None and item.ended_s is not None]
        self.kernels = _Sorted([item for item in done if not hasattr(item, "records")])
        self.comms = _Sorted([item for item in done if hasattr(item, "records")])
        self.met = {
            (record.group.name, record.started_s): item
            for item in self.comms.items
            for record in item.records
            if record.started_s is not None
        }
        """Communication kernels by group and the time at which they began to transfer."""


class _Sorted:
    def __init__(self, items: list[Any]) -> None:
        self.items = sorted(items, key=lambda item: (item.begun_s, item.ended_s))
        self.begins = [item.begun_s for item in self.items]
        self.ends = list(accumulate((item.ended_s for item in self.items), max))
        """The latest end so far."""

    def before(self, at_s: float) -> Any:
        """Return what ran just before *at_s*, the item that began last, or None."""
        position = bisect_left(self.begins, at_s - EPSILON_S)
        while position and self.ends[position - 1] >= at_s - EPSILON_S:
            position -= 1
            if self.items[position].ended_s >= at_s - EPSILON_S:
                return self.items[position]
        return None

    def last_end_s(self, at_s: float) -> float:
        """Return the last end before *at_s*."""
        position = bisect_left(self.begins, at_s - EPSILON_S)
        return self.ends[position - 1] if position else float("-inf")


def critical_path(ran: Mapping[int, Ran], rank: int, begin_s: float, end_s: float) -> tuple[list[PathPart], float]:
    """Return the path that ends on *rank* at *end_s*, back to *begin_s*, and the time at which it begins.

    Equal parts are summed, the longest first. The path begins later than *begin_s* if a rank on it no longer has
    records of its earlier kernels.
    """
    parts: dict[tuple[str, str], float] = {}

    def took(kind: str, name: str, from_s: float, to_s: float) -> None:
        if to_s > from_s:
            parts[kind, name] = parts.get((kind, name), 0.0) + to_s - max(from_s, begin_s)

    at_s = end_s
    for _ in range(MOST_MOVES):
        mine = ran[rank]
        if at_s <= max(begin_s, mine.since_s) + EPSILON_S:
            break
        kernel = mine.kernels.before(at_s)
        if kernel is not None:
            took("compute", operator_name(kernel.name), kernel.begun_s, at_s)
            at_s = kernel.begun_s
            continue
        comm = mine.comms.before(at_s)
        if comm is None:
            last_s = max(begin_s, mine.kernels.last_end_s(at_s), mine.comms.last_end_s(at_s))
            took("host", "nothing was launched", last_s, at_s)
            at_s = last_s
            continue
        started = [r for r in comm.records if r.started_s is not None and r.started_s < at_s - EPSILON_S]
        first = comm.records[0] if comm.records else None
        name = f"{first.op} of {first.group.label}" if first is not None else "communication"
        if not started:
            took("communication", name, comm.begun_s, at_s)
            at_s = comm.begun_s
            continue
        record = max(started, key=lambda r: r.started_s)
        moved_from_s = max(record.started_s, comm.begun_s)
        took("communication", name, moved_from_s, at_s)
        at_s = moved_from_s
        if moved_from_s > comm.begun_s + EPSILON_S:
            rank = _last_to_come(ran, rank, record)
    path_parts = [PathPart(kind, name, seconds) for (kind, name), seconds in parts.items()]
    return sorted(path_parts, key=lambda part: (-part.time_s, part.kind, part.name)), max(at_s, begin_s)


def _last_to_come(ran: Mapping[int, Ran], rank: int, record: Any) -> int:
    """Return the rank that arrived last in the call of *record*, or its own rank."""
    key = (record.group.name, record.started_s)
    last, came_s = rank, float("-inf")
    for member in record.group.ranks if record.peer is None else (rank, record.peer):
        comm = ran[member].met.get(key) if member in ran else None
        if comm is not None and comm.begun_s > came_s:
            last, came_s = member, comm.begun_s
    return last
