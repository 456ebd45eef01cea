"""What one GPU did with its time: computed, waited for communication, for a peer's message, for its host."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, TypeVar

from distsim.debug.records import CallRecord

__all__ = ["Account"]

_Name = TypeVar("_Name")


class Account:
    """Seconds of one device from its first use on. compute + exposed + bubble + host is all of its time."""

    __slots__ = ("bubble_s", "compute_s", "exposed_s", "host_s", "late_s", "operators", "overlapped_s",
                 "slowed_s", "waits")  # fmt: skip

    def __init__(self) -> None:
        self.compute_s = 0.0
        """At least one kernel that computes runs."""
        self.overlapped_s = 0.0
        """Of it: a communication kernel runs beside it."""
        self.slowed_s = 0.0
        """Of that: what the kernels would not have needed on a device of their own."""
        self.exposed_s = 0.0
        """Nothing computes, a communication kernel runs."""
        self.late_s = 0.0
        """Of it: a collective that some member has not come to yet."""
        self.bubble_s = 0.0
        """Nothing runs but a send or receive whose other end has not come yet."""
        self.host_s = 0.0
        """Nothing runs, and nothing is there to run: the host has not launched it yet."""
        self.operators: dict[Any, list[float]] = {}
        """Operator -> [how often, seconds] of its kernels."""
        self.waits: dict[tuple[str, str], list[float]] = {}
        """(operation, group) -> seconds of communication: [moving, late] that nothing hid (a bubble is late), [moving]
        of all of it, and what nothing hid that would not be with [half] of each call's moving."""

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s + self.bubble_s + self.host_s

    def snapshot(self) -> Account:
        """As it is now."""
        taken = copy(self)
        taken.operators = {name: [*times] for name, times in self.operators.items()}
        taken.waits = {name: [*times] for name, times in self.waits.items()}
        return taken

    def since(self, before: Account) -> Account:
        """What came after *before*, an earlier snapshot."""
        gone = Account()
        for name in ("compute_s", "overlapped_s", "slowed_s", "exposed_s", "late_s", "bubble_s", "host_s"):
            setattr(gone, name, getattr(self, name) - getattr(before, name))
        gone.operators = _since(self.operators, before.operators)
        gone.waits = _since(self.waits, before.waits)
        return gone

    def ran(self, name: Any, seconds: float) -> None:
        """A kernel of operator *name* is over, *seconds* after it began."""
        known = self.operators.get(name)
        if known is None:
            self.operators[name] = [1, seconds]
        else:
            known[0] += 1
            known[1] += seconds

    def overlapped(self, seconds: float, used: float) -> None:
        """Kernels ran beside communication, on the share *used* of the device."""
        self.overlapped_s += seconds
        self.slowed_s += seconds * (1.0 - used)

    def communicated(self, records: Sequence[CallRecord], begun_s: float, ended_s: float, exposed_s: float) -> None:
        """A communication kernel that carried out *records* is over; nothing hid *exposed_s* of its moving."""
        if records:
            moving_s, times = _moving_s(records, begun_s, ended_s), self._of(records[0])
            times[2] += moving_s
            times[3] += min(exposed_s, moving_s / 2)

    def _of(self, record: CallRecord) -> list[float]:
        return self.waits.setdefault((record.op, record.group.label), [0.0, 0.0, 0.0, 0.0])

    def waited(self, records: Sequence[CallRecord], from_s: float, to_s: float) -> float:
        """Nothing ran but a communication kernel that carries out *records*. How long bytes moved."""
        if not records:
            self.exposed_s += to_s - from_s
            return to_s - from_s
        moving_s = _moving_s(records, from_s, to_s)
        late_s = max(0.0, to_s - from_s - moving_s)
        first = records[0]
        times = self._of(first)
        times[0] += moving_s
        times[1] += late_s
        self.exposed_s += moving_s
        if first.is_p2p:
            self.bubble_s += late_s
        else:
            self.exposed_s += late_s
            self.late_s += late_s
        return moving_s


def _since(now: dict[_Name, list[float]], before: dict[_Name, list[float]]) -> dict[_Name, list[float]]:
    found = {}
    for name, sums in now.items():
        was = before.get(name)
        if sums != was:
            found[name] = [*sums] if was is None else [n - w for n, w in zip(sums, was, strict=True)]
    return found


def _moving_s(records: Sequence[CallRecord], from_s: float, to_s: float) -> float:
    """Time between the two in which the bytes of at least one call moved."""
    total, end_s = 0.0, from_s
    spans = sorted(
        (r.started_s, to_s if r.completed_s is None else min(to_s, r.completed_s))
        for r in records
        if r.started_s is not None
    )
    for started_s, stop_s in spans:
        begin_s = max(started_s, end_s)
        if stop_s > begin_s:
            total += stop_s - begin_s
            end_s = stop_s
    return total
