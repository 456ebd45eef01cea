"""Who waited for whom: the arrows of a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from distsim.debug.records import CallRecord

__all__ = ["Placed", "arrows"]


@dataclass(frozen=True, slots=True)
class Placed:
    """A call and the track its slice is drawn on."""

    record: CallRecord
    track: int


Arrow = tuple[Placed, float, Placed, float]
"""From a call at a time (seconds) to another at a time."""


def arrows(calls: Iterable[Placed]) -> Iterator[Arrow]:
    """One arrow for each collective that anybody waited in, one for each send that was received."""
    meetings: dict[tuple[str, int], list[Placed]] = {}
    sends: dict[tuple[str, int, int, int], deque[Placed]] = {}
    receives: list[tuple[tuple[str, int, int, int], Placed]] = []
    for call in calls:
        record = call.record
        if not record.is_p2p:
            meetings.setdefault((record.group.name, record.seq), []).append(call)
        elif record.peer is not None and record.op == "send":
            key = (record.group.name, record.rank, record.peer, record.tag or 0)
            sends.setdefault(key, deque()).append(call)
        elif record.peer is not None and record.completed_s is not None:
            receives.append(((record.group.name, record.peer, record.rank, record.tag or 0), call))
    for met in meetings.values():
        first = min(met, key=lambda call: (call.record.issued_s, call.record.rank))
        last = max(met, key=lambda call: (call.record.issued_s, -call.record.rank))
        started_s = first.record.started_s
        if started_s is not None and last.record.issued_s > first.record.issued_s:
            yield last, last.record.issued_s, first, started_s
    for key, receive in receives:
        waiting = sends.get(key)
        completed_s = receive.record.completed_s
        if waiting and completed_s is not None:
            send = waiting.popleft()
            yield send, send.record.issued_s, receive, completed_s
