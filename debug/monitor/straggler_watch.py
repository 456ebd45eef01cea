"""Checks every few seconds whether the ranks of a live job keep pace, and warns if one stays behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from distsim.debug.diagnosis.stragglers import LIVE, MIN_SHARE, SHORT, LateRank, as_findings, stragglers
from distsim.debug.records import CallRecord, Finding
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.debug.rings.reader import Records, RingReader, origin_of, wall_offsets

if TYPE_CHECKING:
    from distsim.debug.monitor.host import Host

LOOK_S = 5.0
"""Seconds between two checks."""
STREAK = 3
"""Number of consecutive checks before a straggler is reported, and before its warning is withdrawn.

A start, a compilation or an evaluation is over by then.
"""
WINDOW = 1024
"""Number of calls of each rank that are examined at a time."""
WHOLE = 4000
"""Number of calls of each rank in the last check: the capacity of a ring."""


class Pace:
    """Stores the results of the last examinations."""

    def __init__(self) -> None:
        self.told: dict[int, LateRank] = {}
        self._next_s: float | None = None
        self._slow: dict[int, int] = {}
        self._fine: dict[int, int] = {}

    def due(self, now_s: float) -> bool:
        """Return whether it is time for the next check."""
        if self._next_s is None or now_s >= self._next_s:
            first = self._next_s is None
            self._next_s = now_s + LOOK_S
            return not first
        return False

    def judge(self, stragglers: Sequence[LateRank]) -> tuple[list[LateRank], list[LateRank]]:
        """Process new evidence. Return the ranks to report and the ranks whose warning to withdraw."""
        slow = {one.rank: one for one in stragglers}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        self._fine = {rank: self._fine.get(rank, 0) + 1 for rank in self.told if rank not in slow}
        new = [one for rank, one in slow.items() if rank not in self.told and self._slow[rank] >= STREAK]
        over = [self.told.pop(rank) for rank, times in self._fine.items() if times >= STREAK]
        self.told.update({one.rank: one for one in new})
        return new, over

    def look_back(self, host: Host, everywhere: Callable[[], Mapping[int, Sequence[CallRecord]]]) -> list[LateRank]:
        """Check a live job, and return the stragglers to report now.

        *everywhere* returns the last calls of a job on several hosts, as many as their monitors send.
        """
        readers = list(host.readers.values())
        records = recent_calls(readers, WINDOW) if len(readers) == host.world_size else everywhere()
        return self.judge(stragglers(records, LIVE) if records else [])[0]

    def has_told(self, diagnosis: Diagnosis) -> bool:
        """Return whether *diagnosis* repeats a warning that was given while the job ran."""
        return diagnosis.kind is Kind.STRAGGLER and set(diagnosis.culprits) <= self.told.keys()

    def findings(self) -> list[Finding]:
        """Return reported stragglers that still hold, one finding each."""
        return [finding for one in self.told.values() for finding in as_findings([one])]


def recent_stragglers(readers: Sequence[RingReader], number: int = WHOLE) -> list[LateRank]:
    """Return the stragglers of one host's job in the last *number* calls of each rank."""
    records = recent_calls(readers, number)
    return (stragglers(records, LIVE) or stragglers(records, SHORT)) if records else []


def recent_calls(readers: Sequence[RingReader], number: int) -> Mapping[int, Sequence[CallRecord]]:
    """Return the last calls of each rank; empty if no rank spends enough time in calls to be kept waiting."""
    windows = {reader.number: reader.since(reader.count - number)[0] for reader in readers}
    if not any(_waits(window) for window in windows.values()):
        return {}
    origin, offsets = origin_of(readers), wall_offsets(readers)
    return {
        rank: [reader.decode(values, origin - offsets[rank]) for values in windows[rank].tolist()]
        for reader in readers
        if (rank := reader.number) in windows
    }


def _waits(window: Records) -> bool:
    done = window[window["completed"] > 0]
    if len(done) < SHORT.meetings:
        return False
    span = int(done["completed"].max()) - int(done["issued"].min())
    inside = int((done["completed"] - done["issued"]).sum())
    return span > SHORT.span_s * 1e9 and inside >= MIN_SHARE * span
