"""Checks every few seconds whether a rank of a live job is chronically slow."""

from __future__ import annotations

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from distsim.debug.diagnosis.pace.job import GroupKey, JobPace, PaceNote, pace_figures, slow_finding, slow_text
from distsim.debug.diagnosis.pace.statistic import Outlook, SlowRank
from distsim.debug.diagnosis.pace.turns import RankCalls
from distsim.debug.diagnosis.stragglers import EVERYBODY
from distsim.debug.monitor.sent_calls import HostClock, SentCalls, joined, packed, shifted, unpacked
from distsim.debug.monitor.slow_cause import CauseSearch
from distsim.debug.records import CallRecord, Finding
from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import RingReader, origin_of, wall_offsets

if TYPE_CHECKING:
    from distsim.debug.monitor.host import Host

LOOK_S = 1.0
"""Seconds between two checks of a job on one host."""
HOSTS_LOOK_S = 5.0
"""The same of a job on several hosts, whose records are sent for each check."""
MOST_CPU = 0.01
"""Largest share of a core that the checks use: after a long one the next one is later."""
STEPS_S = 60.0
"""Seconds between two events about the steps."""
STREAK = 3
"""Number of consecutive checks in which a rank keeps pace before its warning is withdrawn."""
WHOLE = 4000
"""Largest number of calls of each rank that are read in one check: nearly the capacity of a ring."""
OVERLAP = 256
"""Number of calls that are read again, because a turn begins before them."""
HOSTS_OVERLAP = 1024
"""The same of a job on several hosts, whose calls are not known up to the same moment."""
Elsewhere = Callable[[Mapping[int, int]], Sequence[tuple[SentCalls, HostClock | None]]]
"""Returns the calls of other hosts, each with its clock as far as it was compared; the argument is the number of the
first call of each rank that is not known yet."""


class PaceWatch:
    """Reads the calls of a live job, and keeps the ranks that were named and the facts that were reported."""

    def __init__(self) -> None:
        self.job = JobPace()
        self.named: dict[int, tuple[GroupKey, Finding]] = {}
        """Ranks that were reported, with the group that they keep waiting."""
        self._next_s: float | None = None
        self._reads: dict[int, int] = {}
        """Number of the first call of each rank that the next check reads."""
        self._kept: dict[int, RankCalls] = {}
        """Last calls of each rank of a job on several hosts."""
        self._meets: dict[int, bool] = {}
        """Whether the call of a fingerprint is a collective in which all wait for all."""
        self._fine: dict[int, int] = {}
        self._hinted: set[int] = set()
        self._noted: dict[tuple[str, str], int] = {}
        """Facts of the last checks, with the number of checks in a row that found them."""
        self._causes = CauseSearch()
        self._hints: list[PaceNote] = []
        self._steps_s: float | None = None

    def due(self, now_s: float) -> bool:
        """Return whether it is time for the next check."""
        if self._next_s is None or now_s >= self._next_s:
            first = self._next_s is None
            self._next_s = now_s + LOOK_S
            return not first
        return False

    def look(self, host: Host, elsewhere: Elsewhere) -> bool:
        """Check a live job. Return whether a rank is newly named, with certainty.

        Args:
            host: The ranks of this host.
            elsewhere: See `Elsewhere`.
        """
        began_s, used_s = time.monotonic(), time.process_time()
        readers = list(host.readers.values())
        is_alone = len(readers) == host.world_size
        if is_alone:
            self.read(readers)
        else:
            self._read_everywhere(host, elsewhere)
        new = self.judge()
        findings = self.name(new, readers)
        for slow, _ in new:
            self._causes.begin(slow.rank)
            if not slow.is_sure:
                self._hints.append(PaceNote("looks_slow", slow_text(slow), pace_figures(slow)))
        used_s = time.process_time() - used_s
        self._next_s = began_s + max(LOOK_S if is_alone else HOSTS_LOOK_S, used_s / MOST_CPU)
        return bool(findings)

    def send(self, readers: Sequence[RingReader], since: Mapping[int, int]) -> SentCalls:
        """Return the calls of this host's ranks for the monitor that judges; *since*: number of each rank's first."""
        calls = {reader.number: self._ring_calls(reader, since.get(reader.number, 0)) for reader in readers}
        return packed(socket.gethostname(), self.job, calls)

    def _read_everywhere(self, host: Host, elsewhere: Elsewhere) -> None:
        here = {rank: self._ring_calls(reader, self._reads.get(rank, 0)) for rank, reader in host.readers.items()}
        self.job.hosts |= dict.fromkeys(here, socket.gethostname())
        answers: list[tuple[dict[int, tuple[int, RankCalls]], HostClock | None]] = [(here, HostClock(0.0, 0.0))]
        for sent, clock in elsewhere(self._reads):
            try:
                answers.append((unpacked(sent, self.job), clock))
            except ValueError as error:
                host.notes.append(f"host {sent.host} sent invalid calls, which are ignored ({error})")
                continue
            self.job.hosts |= dict.fromkeys(sent.calls, sent.host)
        for calls, clock in answers:
            for rank, (following, new) in calls.items():
                self._reads[rank] = following
                new = new if clock is None else shifted(new, clock.ahead_s)
                self._kept[rank] = joined(self._kept[rank], new, HOSTS_OVERLAP) if rank in self._kept else new
        errors_s = [math.inf if clock is None else clock.error_s for _, clock in answers]
        self.job.take(self._kept, None if math.inf in errors_s else max(errors_s))

    def read(self, readers: Sequence[RingReader]) -> None:
        """Read the calls since the last check from the rings of all ranks of a job on one host."""
        calls = {}
        for reader in readers:
            first = self._reads.get(reader.number, 0) - OVERLAP
            self._reads[reader.number], calls[reader.number] = self._ring_calls(reader, first)
        self.job.take(calls)

    def judge(self) -> list[tuple[SlowRank, GroupKey]]:
        """Return the ranks that are newly named, and those that newly look slow; withdraw what is over."""
        slow = self.job.slow_ranks()
        for rank, (group, _) in list(self.named.items()):
            fine = rank not in slow and self.job.groups[group].history.keeps_pace(rank)
            self._fine[rank] = self._fine.get(rank, 0) + 1 if fine else 0
            if self._fine[rank] >= STREAK:
                del self.named[rank]
        new = [
            (one, key)
            for rank, (one, key) in slow.items()
            if rank not in self.named and (one.is_sure or rank not in self._hinted)
        ]
        self._hinted = set(slow)
        return new

    def name(self, slow_ranks: Sequence[tuple[SlowRank, GroupKey]], readers: Sequence[RingReader]) -> list[Finding]:
        """Keep those of *slow_ranks* that are certain as named, and return their findings."""
        named = {
            slow.rank: (key, slow_finding(slow, key[0], self._last_call(readers, slow.rank, key)))
            for slow, key in slow_ranks
            if slow.is_sure
        }
        self.named |= named
        return [finding for _, finding in named.values()]

    def new_notes(self, readers: Sequence[RingReader], is_last: bool = False) -> list[PaceNote]:
        """Return ranks that look slow, causes, and facts that `STREAK` checks in a row have found; each once.

        Args:
            readers: The rings of this host's ranks.
            is_last: Whether the ranks have ended.
        """
        news, self._hints = [*self._hints, *self._causes.step(readers, is_last)], []
        notes = {note.key: note for note in self.job.notes()}
        self._noted = {key: self._noted.get(key, 0) + 1 for key in notes}
        return [*news, *(note for key, note in notes.items() if self._noted[key] == STREAK)]

    def steps(self, now_s: float) -> Outlook | None:
        """Return what can be seen in the job's steps, once each `STEPS_S`."""
        if self._steps_s is None:
            self._steps_s = now_s
        if now_s - self._steps_s < STEPS_S or (outlook := self.job.outlook()) is None:
            return None
        self._steps_s = now_s
        return outlook[1]

    def findings(self) -> list[Finding]:
        """Return what was reported and still holds, one finding for each rank."""
        return [finding for _, finding in self.named.values()]

    def _ring_calls(self, reader: RingReader, first: int) -> tuple[int, RankCalls]:
        """Return the calls from number *first* on that have ended or are asynchronous, and the number of the next one.

        A blocking call that has not ended comes again, with those after it.
        """
        rank = reader.number
        calls, following = reader.since(max(first, reader.count - WHOLE))
        flags = calls["flags"]
        state = flags & rings.STATE_MASK
        is_async = (flags & rings.ASYNC) > 0
        is_open = ~is_async & (state < rings.COMPLETED)
        if is_open.any():
            following = int(calls["commit"][np.argmax(is_open)]) - 1
        is_usable = (state == rings.COMPLETED) | (is_async & (state < rings.COMPLETED))
        calls = calls[is_usable & (calls["commit"] <= following)]
        flags = calls["flags"]
        group = np.full(len(calls), -1, np.int64)
        is_collective = (flags & rings.OF_TWO) == 0
        for offset in np.unique(calls["group"]):
            entry, here = reader.group(int(offset)), calls["group"] == offset
            if entry.group.ranks:
                key = reader.job_group(int(offset)), entry.generation
                group[here & is_collective] = self.job.numbers.setdefault(key, len(self.job.numbers))
                peers = np.unique(calls["peer"][here & ~is_collective]).tolist()
                numbers = reader.numbers.get(entry.world)
                named = [numbers[peer] if numbers and peer < len(numbers) else peer for peer in peers if peer >= 0]
                self.job.pairs.update((rank, peer) for peer in named)
        _, at, inverse = np.unique(calls["fingerprint"], return_index=True, return_inverse=True)
        meets = np.array([self._is_meeting(reader, calls[index]) for index in at], bool)
        issued = calls["issued"] / 1e9
        return following, RankCalls(
            group,
            calls["seq"].astype(np.int64),
            (calls["fingerprint"] ^ (calls["site_hash"] << np.uint64(1))).view(np.int64),
            issued,
            np.where(calls["completed"] > 0, calls["completed"] / 1e9, issued),
            meets[inverse] & is_collective if len(at) else np.zeros(0, bool),
            (flags & rings.ASYNC) > 0,
        )

    def _is_meeting(self, reader: RingReader, call: np.void) -> bool:
        fingerprint = int(call["fingerprint"])
        if fingerprint not in self._meets:
            op = reader.signature(int(call["signature"]), fingerprint).op
            if not op:
                return False  # a later call has overwritten it
            self._meets[fingerprint] = op in EVERYBODY
        return self._meets[fingerprint]

    def _last_call(self, readers: Sequence[RingReader], rank: int, group: GroupKey) -> CallRecord | None:
        """Return the last call at the line of *rank* that most turns end with; None if its ring is on another host."""
        reader = next((reader for reader in readers if reader.number == rank), None)
        if reader is None:
            return None
        origin_ns = origin_of(readers) - wall_offsets(readers)[rank]
        calls = [reader.decode(values, origin_ns) for values in reader.since(reader.count - OVERLAP)[0].tolist()]
        calls = [call for call in calls if call.group == group[0] and call.seq <= self.job.groups[group].last]
        usual = Counter((call.op, call.site) for call in calls).most_common(1)
        return next((call for call in reversed(calls) if (call.op, call.site) == usual[0][0]), None)


def pace_of(readers: Sequence[RingReader]) -> tuple[list[SlowRank], Outlook | None]:
    """Return the slow ranks of one host's job by what its rings hold, and what can be seen in them."""
    watch = PaceWatch()
    watch.read(readers)
    outlook = watch.job.outlook()
    return [slow for slow, _ in watch.judge()], outlook[1] if outlook is not None else None


def slow_findings(readers: Sequence[RingReader]) -> list[Finding]:
    """Return the ranks that are slow with certainty, by what the rings of one host's job hold."""
    watch = PaceWatch()
    watch.read(readers)
    return watch.name(watch.judge(), readers)
