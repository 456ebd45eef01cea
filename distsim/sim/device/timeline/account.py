"""Accounts for one GPU's time: computation, communication, waits for peers and the host."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, TypeVar

from distsim.debug.records import CallRecord

_Name = TypeVar("_Name")


class Account:
    """Account of a device's seconds since its first use. The sum of compute, exposed, bubble and host is the elapsed
    time.
    """

    __slots__ = ("bubble_s", "compute_s", "exposed_s", "host_s", "kinds", "late_s", "operators", "overlapped_s",
                 "slowed_s", "waits")  # fmt: skip

    def __init__(self) -> None:
        self.compute_s = 0.0
        """Seconds in which at least one kernel computed."""
        self.overlapped_s = 0.0
        """Seconds of `compute_s` in which a communication kernel ran at the same time."""
        self.slowed_s = 0.0
        """Seconds of `overlapped_s` that the computing kernels lost to communication."""
        self.exposed_s = 0.0
        """Seconds in which only communication kernels ran."""
        self.late_s = 0.0
        """Seconds of `exposed_s` in which a collective waited for a member."""
        self.bubble_s = 0.0
        """Seconds in which only a send or receive ran, and waited for its other end."""
        self.host_s = 0.0
        """Seconds in which the device was idle because the host had not launched any work."""
        self.operators: dict[Any, list[float]] = {}
        """Number and seconds of the kernels of each operator."""
        self.kinds: dict[str, float] = {}
        """Seconds of kernels by their kind, as in `Cost.kind`."""
        self.waits: dict[tuple[str, str], list[float]] = {}
        """Seconds of communication by (operation, group), as a list: exposed seconds in which bytes moved; exposed
        seconds of waiting (late, or a bubble); all seconds in which bytes moved; exposed seconds that half the
        transfer time of each call would save.
        """

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s + self.bubble_s + self.host_s

    def snapshot(self) -> Account:
        """Return a copy of the current account."""
        taken = copy(self)
        taken.operators = {name: [*times] for name, times in self.operators.items()}
        taken.kinds = dict(self.kinds)
        taken.waits = {name: [*times] for name, times in self.waits.items()}
        return taken

    def since(self, before: Account) -> Account:
        """Return what was added since *before*, an earlier snapshot."""
        gone = Account()
        for name in ("compute_s", "overlapped_s", "slowed_s", "exposed_s", "late_s", "bubble_s", "host_s"):
            setattr(gone, name, getattr(self, name) - getattr(before, name))
        gone.operators = _since(self.operators, before.operators)
        gone.kinds = {kind: seconds - before.kinds.get(kind, 0.0) for kind, seconds in self.kinds.items()}
        gone.waits = _since(self.waits, before.waits)
        return gone

    def ran(self, name: Any, kind: str, seconds: float) -> None:
        """Add a kernel of operator *name* that ran for *seconds*."""
        self.kinds[kind] = self.kinds.get(kind, 0.0) + seconds
        known = self.operators.get(name)
        if known is None:
            self.operators[name] = [1, seconds]
        else:
            known[0] += 1
            known[1] += seconds

    def overlapped(self, seconds: float, used: float) -> None:
        """Add time in which kernels ran beside communication, on the share *used* of the device."""
        self.overlapped_s += seconds
        self.slowed_s += seconds * (1.0 - used)

    def communicated(self, records: Sequence[CallRecord], begun_s: float, ended_s: float, exposed_s: float) -> None:
        """Add a finished communication kernel that carried out *records*. Nothing hid *exposed_s* of its transfer."""
        if records:
            moving_s, times = _moving_s(records, begun_s, ended_s), self._of(records[0])
            times[2] += moving_s
            times[3] += min(exposed_s, moving_s / 2)

    def _of(self, record: CallRecord) -> list[float]:
        return self.waits.setdefault((record.op, record.group.label), [0.0, 0.0, 0.0, 0.0])

    def waited(self, records: Sequence[CallRecord], from_s: float, to_s: float) -> float:
        """Account for time in which only a communication kernel for *records* ran, and return how long bytes moved."""
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
    result = {}
    for name, sums in now.items():
        was = before.get(name)
        if sums != was:
            result[name] = [*sums] if was is None else [n - w for n, w in zip(sums, was, strict=True)]
    return result


def _moving_s(records: Sequence[CallRecord], from_s: float, to_s: float) -> float:
    """Return the seconds between the two times in which the bytes of at least one call moved."""
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
