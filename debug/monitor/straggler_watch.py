"""Checks every few seconds whether the ranks of a live job keep pace, and warns if one is chronically slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from distsim.debug.diagnosis.pace.statistic import Outlook, SlowRank, StepHistory
from distsim.debug.diagnosis.pace.steps import StepCutter
from distsim.debug.diagnosis.pace.turns import RankCalls, find_turns
from distsim.debug.diagnosis.stragglers import EVERYBODY
from distsim.debug.records import CallRecord, Finding, Group, State
from distsim.debug.records.kinds import Kind
from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import RingReader, origin_of, wall_offsets

if TYPE_CHECKING:
    from distsim.debug.monitor.host import Host

LOOK_S = 2.0
"""Seconds between two checks of a job on one host."""
HOSTS_LOOK_S = 5.0
"""The same of a job on several hosts, whose records are sent for each check."""
MOST_CPU = 0.01
"""Largest share of a core that the checks use: after a long one the next one is later."""
STREAK = 3
"""Number of consecutive checks in which a rank keeps pace before its warning is withdrawn."""
WHOLE = 4000
"""Largest number of calls of each rank that are read in one check: nearly the capacity of a ring."""
OVERLAP = 256
"""Number of calls that are read again, because a turn begins before them."""

GroupKey = tuple[Group, int]
"""A group and the number of groups of that name that the process had before it."""
Calls = dict[int, RankCalls]


@dataclass
class _GroupPace:
    """Turns and steps of one group."""

    history: StepHistory
    cutter: StepCutter = field(default_factory=StepCutter)
    last: int = -1
    """Number of the call that ended the last known turn."""


@dataclass(frozen=True)
class _NamedRank:
    slow: SlowRank
    group: GroupKey
    finding: Finding


class PaceWatch:
    """Collects the steps of a job's groups, and keeps the ranks that were named."""

    def __init__(self) -> None:
        self.named: dict[int, _NamedRank] = {}
        self._next_s: float | None = None
        self._groups: dict[GroupKey, _GroupPace] = {}
        self._numbers: dict[GroupKey, int] = {}
        self._reads: dict[int, int] = {}
        """Number of the first call of each rank that the next check reads."""
        self._pairs: set[tuple[int, int]] = set()
        """Ranks that have sent each other messages."""
        self._meets: dict[int, bool] = {}
        """Whether the call of a fingerprint is a collective in which all wait for all."""
        self._fine: dict[int, int] = {}
        self._hinted: set[int] = set()

    def due(self, now_s: float) -> bool:
        """Return whether it is time for the next check."""
        if self._next_s is None or now_s >= self._next_s:
            first = self._next_s is None
            self._next_s = now_s + LOOK_S
            return not first
        return False

    def look(self, host: Host, everywhere: Callable[[], Mapping[int, Sequence[CallRecord]]]) -> list[SlowRank]:
        """Check a live job, and return the ranks to report now: named with certainty, or looking slow.

        Args:
            host: The ranks of this host.
            everywhere: Returns the last calls of all ranks of a job on several hosts. Their clocks are not compared.
        """
        began_s, used_s = time.monotonic(), time.process_time()
        readers = list(host.readers.values())
        if len(readers) == host.world_size:
            self.read(readers)
        else:
            self.take_records(everywhere())
        new = self.judge()
        self.name(new, readers)
        used_s = time.process_time() - used_s
        self._next_s = began_s + max(LOOK_S if len(readers) == host.world_size else HOSTS_LOOK_S, used_s / MOST_CPU)
        return [slow for slow, _ in new]

    def read(self, readers: Sequence[RingReader]) -> None:
        """Read the calls since the last check from the rings of all ranks of a job on one host."""
        self._take({reader.number: self._ring_calls(reader) for reader in readers}, one_clock=True)

    def take_records(self, records: Mapping[int, Sequence[CallRecord]], one_clock: bool = False) -> None:
        """Take the last calls of each rank, in program order; *one_clock*: their times can be compared."""
        self._take({rank: self._record_calls(calls) for rank, calls in records.items()}, one_clock)

    def judge(self) -> list[tuple[SlowRank, GroupKey]]:
        """Return the ranks that are newly named, and those that newly look slow; withdraw what is over."""
        slow: dict[int, tuple[SlowRank, GroupKey]] = {}
        for key, pace in self._groups.items():
            for one in pace.history.slow_ranks():
                if one.rank not in slow or slow[one.rank][0].excess_s < one.excess_s:
                    slow[one.rank] = one, key
        for rank, named in list(self.named.items()):
            fine = rank not in slow and self._groups[named.group].history.keeps_pace(rank)
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
            slow.rank: _NamedRank(slow, key, slow_finding(slow, key[0], self._last_call(readers, slow.rank, key)))
            for slow, key in slow_ranks
            if slow.is_sure
        }
        self.named |= named
        return [one.finding for one in named.values()]

    def outlook(self) -> tuple[Group, Outlook] | None:
        """Return what can be seen in the largest group whose members work in steps; None if there is none."""
        known = [(key[0], pace.history.outlook()) for key, pace in self._groups.items() if pace.history.steps]
        return max(known, key=lambda one: (len(one[0].ranks), one[1].steps), default=None)

    def findings(self) -> list[Finding]:
        """Return what was reported and still holds, one finding for each rank."""
        return [named.finding for named in self.named.values()]

    # From calls to steps ---------------------------------------------------------------------------

    def _take(self, calls: Calls, one_clock: bool) -> None:
        for key, number in self._numbers.items():
            ranks = key[0].ranks
            if len(ranks) < 2 or not all(rank in calls for rank in ranks):
                continue
            if any(one in ranks and other in ranks for one, other in self._pairs):
                self._groups.pop(key, None)  # stages of a pipeline do different work by design
                continue
            last = self._groups[key].last if key in self._groups else -1
            turns = find_turns(calls, number, ranks, one_clock, last)
            if turns is None or not len(turns.seq):
                continue
            pace = self._groups.setdefault(key, _GroupPace(StepHistory(ranks)))
            pace.last = int(turns.seq[-1])
            steps, is_new = pace.cutter.add(turns)
            if is_new:
                pace.history = StepHistory(ranks)
            pace.history.own_clock = 2 * turns.own_clock.sum() > len(turns.own_clock)
            if steps is not None:
                pace.history.add(steps.work_s, steps.length_s)

    def _ring_calls(self, reader: RingReader) -> RankCalls:
        rank, count = reader.number, reader.count
        first = max(self._reads.get(rank, 0) - OVERLAP, count - WHOLE)
        calls, self._reads[rank] = reader.since(first)
        flags = calls["flags"]
        state = flags & rings.STATE_MASK
        is_async = (flags & rings.ASYNC) > 0
        calls = calls[(state == rings.COMPLETED) | (is_async & (state < rings.COMPLETED))]
        flags = calls["flags"]
        group = np.full(len(calls), -1, np.int64)
        is_collective = (flags & rings.OF_TWO) == 0
        for offset in np.unique(calls["group"]):
            entry, here = reader.group(int(offset)), calls["group"] == offset
            if entry.group.ranks:
                key = reader.job_group(int(offset)), entry.generation
                group[here & is_collective] = self._numbers.setdefault(key, len(self._numbers))
                peers = np.unique(calls["peer"][here & ~is_collective])
                numbers = reader.numbers.get(entry.world)
                named = [peer if numbers is None else numbers[peer] for peer in peers.tolist() if peer >= 0]
                self._pairs.update((rank, peer) for peer in named)
        _, at, inverse = np.unique(calls["fingerprint"], return_index=True, return_inverse=True)
        meets = np.array([self._is_meeting(reader, calls[index]) for index in at], bool)
        issued = calls["issued"] / 1e9
        return RankCalls(
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

    def _record_calls(self, records: Sequence[CallRecord]) -> RankCalls:
        ended = [c for c in records if c.state is State.COMPLETED or (c.is_async and c.state is not State.FAILED)]
        self._pairs.update((call.rank, call.peer) for call in ended if call.is_p2p and call.peer is not None)
        groups = [
            -1 if call.is_p2p else self._numbers.setdefault((call.group, 0), len(self._numbers)) for call in ended
        ]
        keys = [rings.fingerprint((c.op, str(c.site), c.input_shapes, c.dtypes), False) >> 1 for c in ended]
        issued = np.array([call.issued_s for call in ended])
        return RankCalls(
            np.array(groups, np.int64),
            np.array([call.seq for call in ended], np.int64),
            np.array(keys, np.int64),
            issued,
            np.array([call.issued_s if call.completed_s is None else call.completed_s for call in ended]),
            np.array([not call.is_p2p and call.op in EVERYBODY for call in ended], bool),
            np.array([call.is_async for call in ended], bool),
        )

    def _last_call(self, readers: Sequence[RingReader], rank: int, group: GroupKey) -> CallRecord | None:
        """Return the call that ended the last turn of *rank*; None if its ring is on another host."""
        reader = next((reader for reader in readers if reader.number == rank), None)
        if reader is None:
            return None
        origin_ns = origin_of(readers) - wall_offsets(readers)[rank]
        for values in reversed(reader.since(reader.count - OVERLAP)[0].tolist()):
            call = reader.decode(values, origin_ns)
            if call.group == group[0] and call.seq == self._groups[group].last:
                return call
        return None


def pace_of(readers: Sequence[RingReader]) -> tuple[list[SlowRank], Outlook | None]:
    """Return the slow ranks of one host's job by what its rings hold, and what can be seen in them."""
    watch = PaceWatch()
    watch.read(readers)
    outlook = watch.outlook()
    return [slow for slow, _ in watch.judge()], outlook[1] if outlook is not None else None


def slow_findings(readers: Sequence[RingReader]) -> list[Finding]:
    """Return the ranks that are slow with certainty, by what the rings of one host's job hold."""
    watch = PaceWatch()
    watch.read(readers)
    return watch.name(watch.judge(), readers)


def slow_text(slow: SlowRank) -> str:
    """Return one clause: `rank 2 works 5.1 ms longer than the others in each step of 67 ms, 7.6% of the time, ...`."""
    verb = "works" if slow.is_sure else "looks slow: it works"
    return (
        f"rank {slow.rank} {verb} {slow.excess_s * 1e3:.3g} ms longer than the others in each step of "
        f"{slow.step_s * 1e3:.3g} ms, {slow.share:.1%} of the time, since step {slow.since_step} "
        f"({slow.certainty:.1f} standard errors in {slow.window} steps)"
    )


def pace_figures(slow: SlowRank) -> dict[str, float]:
    """Return the figures of a slow rank for JSON."""
    return {name: value for name, value in asdict(slow).items() if name != "is_sure"}


def slow_finding(slow: SlowRank, group: Group, call: CallRecord | None) -> Finding:
    """Return the finding of a slow rank; *call*: its last one before which it worked longer."""
    site = None if call is None else call.site
    return Finding(
        Kind.STRAGGLER,
        (slow.rank,),
        f"{slow_text(slow)}; the others wait for it",
        group=group,
        call=call,
        site=site,
        suggestion=f"Look at what rank {slow.rank} does before {site or 'its collectives'}: its share of the data, "
        "its host, its clock speed.",
        pace=pace_figures(slow),
    )


def outlook_text(outlook: Outlook) -> str:
    """Return what can be seen: `noise of a step 4%: a rank 10% slower would be named within 40 steps`."""
    if outlook.unknown:
        return outlook.unknown
    noise = f"{outlook.steps} steps of {outlook.step_s * 1e3:.3g} ms, noise {outlook.noise:.0%}: "
    if outlook.needed_steps is None:
        return f"{noise}a rank 10% slower would cost less than 4% of a step and would not be named"
    return f"{noise}a rank 10% slower would be named after {outlook.needed_steps} steps"
