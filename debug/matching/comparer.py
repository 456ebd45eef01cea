"""Comparison of calls as they arrive: arrays of fingerprints, group by group.

If ranks agree, each poll costs one numpy comparison. Only a set of fingerprints (or of call sites) that was never
seen before is compared call by call. A comparer reports a suspicious pair of fingerprints once. The records behind
it may be on hosts whose monitors are not connected yet, or that answer late; `Suspicions` keeps it until the judging
monitor has the records.

Messages are compared by their number: the n-th send of a rank to another, and the n-th receive from it. Records
carry this number by (operation, peer, tag), so the two ends of a message are matched even if records in between were
lost. A receive from any source has no such number, and its sender is known only afterwards: it shows as a gap in the
numbers of the receives from that sender. From then on, that rank's receives with that tag are left to the diagnosis
at the end, and so are all receives of a rank whose ring was overrun (the lost ones may have been from any source)
and messages next to a failed one, which has a number but may never have been sent. So no wrong pair is formed. Rows
of messages between hosts are sent to the leader, as those of groups are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from distsim.debug.records.signature import Signature
from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import Records

Numbers = NDArray[np.uint64]
MARK = "\0"
"""First character of keys that do not belong to groups, whose names are printable."""
PAIR = f"{MARK}pair"
"""Start of a suspicion's key for a message: (PAIR + world, (sender, receiver), index of the send). Its number is the
index of the receive.
"""
STREAM = f"{MARK}p2p"
"""Start of a stream's key."""

GroupKey = tuple[str, tuple[int, ...], int]
"""Name, members and generation of a group."""
StreamKey = tuple[str, tuple[int, ...], int]
"""Group, (sender, receiver) and tag. It has the form of a group's key, so that other hosts send its rows in the same
way.
"""
Row = Sequence[int]
"""Row of a message: 2 * number, plus 1 for a send; hash of bytes and dtype; index of the record."""

MOST_WAITING = 65536
"""Largest number of messages of which one end was seen. The oldest are dropped, because an end that never arrives
would stay forever.
"""
MOST_KNOWN = 65536
SETTLE_S = 0.25
"""Seconds after which two lines can be compared: whether they were swapped is known only when all ranks have reached
both.
"""
AGAIN_S = 0.5
MOST_LOOKS = 20
"""Number of attempts for a call whose members' hosts do not answer (ten seconds), after which they count as cut off."""
MOST_HELD = 4096
"""Largest number of suspicions. The first ones are kept, because later ones follow from them."""


@dataclass(frozen=True)
class Suspicion:
    """Calls with one number whose fingerprints (or lines) were never seen together before.

    It may also be the two ends of a message, with a key as in `PAIR`.
    """

    key: GroupKey
    seq: int
    lines_only: bool
    """Whether the calls agree and only their lines differ."""


@dataclass
class _Uncompared:
    """Calls of one group that not all members have made yet."""

    key: GroupKey
    done: int = 0
    """Number of calls that all members have made and that were compared."""
    waiting: dict[int, list[Numbers]] = field(default_factory=dict)
    """Arrays of (seq, fingerprint, site hash) rows, in order, by rank."""
    known: set[bytes] = field(default_factory=set)


class Comparer:
    """Calls of each group that not all members have made yet."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, _Uncompared] = {}
        self._touched: set[GroupKey] = set()
        self.messages = Messages()
        self.compared = 0

    def feed(
        self,
        process: Any,
        records: Records,
        key_of: Any,
        signature_of: Any,
        route: Any = None,
        rank_in: Callable[[GroupKey], int] | None = None,
    ) -> None:
        """Take new calls of a process.

        *key_of(table offset)* returns the group's key, or None if the call is not compared; *signature_of(position,
        fingerprint)* returns the arguments of a message. *route(rank, key, rows)* may take calls away to be compared
        on another host. *rank_in(key)* is the process's rank in the world of the key's members; without it *process*
        is its rank.
        """
        rank_in = rank_in or (lambda key: int(process))
        self.messages.feed(process, records, key_of, signature_of, route, rank_in)
        collective = records[(records["flags"] & (rings.OF_TWO | rings.REJECTED)) == 0]
        if not len(collective):
            return
        for offset in np.unique(collective["group"]):
            key = key_of(int(offset))
            if key is None:
                continue
            mine = collective[collective["group"] == offset]
            rank = rank_in(key)
            rows = np.stack([mine["seq"], mine["fingerprint"], mine["site_hash"]], axis=1)
            if route is None or not route(rank, key, rows):
                self.feed_rows(rank, key, rows)

    def feed_rows(self, rank: int, key: GroupKey, rows: Numbers) -> None:
        """Add rows of (seq, fingerprint, site hash), from a ring or another host's monitor, or of a message."""
        if key[0].startswith(STREAM):
            self.messages.feed_rows(key, rows.tolist())
            return
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Uncompared(key)
        group.waiting.setdefault(rank, []).append(rows)
        self._touched.add(key)

    def check(self) -> list[Suspicion]:
        """Compare the calls that all members have made by now, and return new suspicions."""
        result = [Suspicion(key, index, lines_only=False) for key, index in self.messages.check()]
        touched, self._touched = self._touched, set()
        for key in sorted(touched):
            group = self._groups[key]
            if all(rank in group.waiting for rank in key[1]):
                result += self._compare(group)
        return result

    def _compare(self, group: _Uncompared) -> list[Suspicion]:
        ranks = group.key[1]
        rows = {rank: np.concatenate(group.waiting[rank]) for rank in ranks}
        start = max(int(r[0, 0]) for r in rows.values())
        end = min(int(r[-1, 0]) for r in rows.values())
        if end < start:
            for rank in ranks:
                group.waiting[rank] = [rows[rank]]
            return []
        parts = []
        for rank in ranks:
            mine = rows[rank]
            parts.append(mine[(mine[:, 0] >= start) & (mine[:, 0] <= end)])
            rest = mine[mine[:, 0] > end]
            group.waiting[rank] = [rest] if len(rest) else []
            if not len(rest):
                del group.waiting[rank]
        if len({len(part) for part in parts}) > 1 or any((p[:, 0] != parts[0][:, 0]).any() for p in parts):
            parts = _common(parts)  # a ring was overrun, or threads wrote out of order
        group.done = end
        stacked = np.stack(parts)  # rank, call, (seq, fingerprint, site)
        self.compared += stacked.shape[1]
        prints, sites = stacked[:, :, 1], stacked[:, :, 2]
        odd_prints = (prints != prints[0]).any(axis=0) | ((prints[0] & 1) == 1)
        odd_sites = (sites != sites[0]).any(axis=0)
        result = []
        for index in np.flatnonzero(odd_prints | odd_sites):
            pattern = stacked[:, index, 1:].tobytes()
            if pattern in group.known:
                continue
            if len(group.known) > MOST_KNOWN:
                group.known.clear()
            group.known.add(pattern)
            result.append(Suspicion(group.key, int(stacked[0, index, 0]), lines_only=not odd_prints[index]))
        return result

    def progress(self) -> Iterable[tuple[GroupKey, int]]:
        """Yield each group and the number of calls that all its members have made."""
        return ((group.key, group.done) for group in self._groups.values())


def _common(parts: list[Numbers]) -> list[Numbers]:
    numbers = parts[0][:, 0]
    for part in parts[1:]:
        numbers = np.intersect1d(numbers, part[:, 0])
    answer = []
    for part in parts:
        _, first = np.unique(part[:, 0], return_index=True)
        part = part[first]
        answer.append(part[np.isin(part[:, 0], numbers)])
    return answer


class Messages:
    """Sends and receives whose partner has not been seen yet."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[StreamKey, int], tuple[int, int]] = {}
        """Second and third word of a row, by stream and first word."""
        self._forgotten: dict[tuple[StreamKey, int], int] = {}
        """First word of the last row that was dropped, by stream and direction (1 for sends)."""
        self._received: dict[StreamKey, int] = {}
        """Number of the last receive by stream; the most recently used stream is last."""
        self._loose: set[tuple[str, int, int]] = set()
        """(group, receiver, tag) whose receives have ambiguous numbers."""
        self._lossy: set[tuple[str, int]] = set()
        """(group, rank) whose messages were overwritten before they were read."""
        self._next: dict[Hashable, int] = {}
        """Index of the next record to read, by process."""
        self._gaps: set[Hashable] = set()
        self._seen: dict[tuple[str, int], int] = {}
        self._names: dict[GroupKey, str] = {}
        self._ends: dict[int, tuple[int, int]] = {}
        """Direction (1 for a send) and hash of bytes and dtype, by fingerprint."""
        self._patterns: dict[tuple[tuple[int, ...], int, int], int] = {}
        self._found: list[tuple[StreamKey, int, int]] = []
        """Mismatched pairs: stream, index of the send, index of the receive."""
        self.compared = 0

    def feed(
        self,
        process: Hashable,
        records: Records,
        key_of: Callable[[int], GroupKey | None],
        signature_of: Callable[[int, int], Signature],
        route: Callable[[int, StreamKey, NDArray[np.uint64]], bool] | None,
        rank_in: Callable[[GroupKey], int],
    ) -> None:
        """Take all new calls of a process. A gap in their numbers means that the ring was overrun."""
        if not len(records):
            return
        self._note_gap(process, records)
        calls = records[(records["flags"] & rings.P2P_CALL) != 0]
        for offset in np.unique(calls["group"]):
            key = key_of(int(offset))
            if key is None:
                continue
            rank, mine = rank_in(key), calls[calls["group"] == offset]
            streams = self._sort(rank, self._name(key), mine, signature_of, process in self._gaps)
            for stream, rows in streams.items():
                if route is None or not route(rank, stream, np.array(rows, dtype=np.uint64)):
                    self.feed_rows(stream, rows)

    def _note_gap(self, process: Hashable, records: Records) -> None:
        first, last = int(records["commit"][0]), int(records["commit"][-1])
        if first != self._next.get(process, 1) or last - first + 1 != len(records):
            self._gaps.add(process)
        self._next[process] = last + 1

    def _name(self, key: GroupKey) -> str:
        result = self._names.get(key)
        if result is None:
            name, ranks, generation = key
            result = self._names[key] = f"{STREAM}{name}/{generation}/{crc32(repr(ranks).encode())}"
        return result

    def _sort(
        self, rank: int, group: str, calls: Records, signature_of: Callable[[int, int], Signature], has_gaps: bool
    ) -> dict[StreamKey, list[Row]]:
        """Return the rows of each stream that can be compared."""
        seen = self._seen[group, rank] = self._seen.get((group, rank), 0) + len(calls)
        if has_gaps and int(calls["seq"].max()) > seen:
            self._lossy.add((group, rank))
        self._learn(calls, signature_of)
        streams: dict[StreamKey, list[Row]] = {}
        columns = (calls[name].tolist() for name in ("commit", "fingerprint", "peer", "tag", "ordinal"))
        for commit, print_, peer, tag, ordinal in zip(*columns, strict=True):
            end = self._ends.get(print_)
            if end is None:  # its signature is overwritten: it may be a receive
                self._lossy.add((group, rank))
                continue
            sends, payload = end
            sender, receiver = (rank, peer) if sends else (peer, rank)
            stream = (group, (sender, receiver), tag)
            if self._left_out(stream):
                continue
            if not sends and not self._follows(stream, ordinal):
                continue
            streams.setdefault(stream, []).append((2 * ordinal + sends, payload, commit - 1))
        return streams

    def _follows(self, stream: StreamKey, ordinal: int) -> bool:
        """Return whether a receive is the next of its stream; otherwise one from any source was among them."""
        last = self._received.pop(stream, 0)
        if stream[1][0] < 0 or ordinal != last + 1:
            self._leave_out(stream[0], stream[1][1], stream[2])
            return False
        self._received[stream] = ordinal  # behind those that have rested longer
        if len(self._received) > MOST_KNOWN:  # one that comes again will not follow, and is left to the end
            _drop_oldest(self._received)
        return True

    def _leave_out(self, group: str, receiver: int, tag: int) -> None:
        self._loose.add((group, receiver, tag))
        if len(self._loose) > MOST_KNOWN:
            self._lossy.update((group, rank) for group, rank, _ in self._loose)
            self._loose.clear()

    def _left_out(self, stream: StreamKey) -> bool:
        group, (_, receiver), tag = stream
        return (group, receiver, tag) in self._loose or (group, receiver) in self._lossy

    def note_failed(
        self,
        rank_in: Callable[[GroupKey], int],
        calls: Records,
        key_of: Callable[[int], GroupKey | None],
        signature_of: Callable[[int, int], Signature],
    ) -> None:
        """Record messages of a process that have failed by now. The numbers of later messages may be shifted by one."""
        self._learn(calls, signature_of)
        for call in calls:
            key, end = key_of(int(call["group"])), self._ends.get(int(call["fingerprint"]))
            if key is not None:
                receiver = int(call["peer"]) if end is not None and end[0] else rank_in(key)
                self._leave_out(self._name(key), receiver, int(call["tag"]))

    def _learn(self, calls: Records, signature_of: Callable[[int, int], Signature]) -> None:
        """Read the arguments of messages, once for each new fingerprint."""
        prints, places = np.unique(calls["fingerprint"][::-1], return_index=True)
        for print_, index in zip(prints.tolist(), places.tolist(), strict=True):
            if print_ in self._ends:
                continue
            signature = signature_of(int(calls["signature"][len(calls) - 1 - index]), print_)
            if signature.op in ("send", "recv"):
                payload = rings.fingerprint((signature.nbytes, signature.dtypes[:1]), False)
                self._ends[print_] = int(signature.op == "send"), payload
        if len(self._ends) > MOST_KNOWN:
            fresh = {print_: self._ends[print_] for print_ in prints.tolist() if print_ in self._ends}
            self._ends = fresh

    def feed_rows(self, stream: StreamKey, rows: Iterable[Row]) -> None:
        """Add rows of one end of a stream, from a ring or another host's monitor."""
        waiting = self._waiting
        for number, payload, index in rows:
            other = waiting.pop((stream, number ^ 1), None)
            if other is None:
                if self._forgotten.get((stream, ~number & 1), -1) < number ^ 1:
                    waiting[stream, number] = payload, index
                continue
            self.compared += 1
            if other[0] != payload:
                mine = payload, index
                self._suspect(stream, *((mine, other) if number & 1 else (other, mine)))
        while len(waiting) > MOST_WAITING:
            for old, number in _drop_oldest(waiting):
                self._forgotten.pop((old, number & 1), None)
                self._forgotten[old, number & 1] = number
            if len(self._forgotten) > MOST_KNOWN:
                _drop_oldest(self._forgotten)

    def _suspect(self, stream: StreamKey, send: tuple[int, int], recv: tuple[int, int]) -> None:
        """Note a pair that does not match; equal pairs are checked again at growing intervals, as the first check
        may be too late.
        """
        if len(self._patterns) > MOST_KNOWN:
            self._patterns.clear()
        pattern = stream[1], send[0], recv[0]
        times = self._patterns[pattern] = self._patterns.get(pattern, 0) + 1
        if times & (times - 1) == 0:
            self._found.append((stream, send[1], recv[1]))

    def check(self) -> list[tuple[StreamKey, int]]:
        """Return the mismatched pairs found since the last call."""
        pairs, self._found = self._found, []
        return [
            ((PAIR + world_of(stream), stream[1], send), recv)
            for stream, send, recv in pairs
            if not self._left_out(stream)
        ]


def world_of(key: GroupKey | StreamKey) -> str:
    """Return the world whose ranks are in the key of a group, stream or pair; empty for the launcher's world."""
    name = key[0]
    if name.startswith(PAIR):
        return name.removeprefix(PAIR)
    match = _WORLD.match(name.removeprefix(STREAM))
    return match[1] if match else ""


_WORLD = re.compile(r"([0-9a-f]{12}):")


def _drop_oldest(table: dict[Any, Any]) -> list[Any]:
    """Drop the oldest quarter of a table and return it. Dropping single entries is slow: a dictionary finds its
    first entry slowly after many deletions.
    """
    oldest = list(islice(table, len(table) // 4 + 1))
    for key in oldest:
        del table[key]
    return oldest


@dataclass
class _Held:
    first: Suspicion
    """Earliest suspected call of the group."""
    due: float
    looks: int = 0


class Suspicions:
    """Suspicions of one monitor: the earliest call of each group, and each message."""

    def __init__(self) -> None:
        self._held: dict[GroupKey, _Held] = {}

    def add(self, suspicions: Iterable[Suspicion], now: float) -> None:
        """Add suspicions of a comparer here or on another host."""
        for suspicion in suspicions:
            due = now + SETTLE_S if suspicion.lines_only else now
            held = self._held.get(suspicion.key)
            if held is not None:
                held.due = min(held.due, due)
                if suspicion.seq < held.first.seq:
                    held.first = suspicion
            elif len(self._held) < MOST_HELD:
                self._held[suspicion.key] = _Held(suspicion, due)

    def hand_over(self) -> list[Suspicion]:
        """Return all suspicions, for the monitor that judges."""
        all_, self._held = [held.first for held in self._held.values()], {}
        return all_

    def due(self, now: float) -> dict[GroupKey, int]:
        """Return the calls to check now, by group or message."""
        return {key: held.first.seq for key, held in self._held.items() if held.due <= now}

    def looked_at(
        self,
        calls: Iterable[GroupKey],
        ranks: Collection[int],
        now: float,
        members: Callable[[GroupKey], Sequence[int]] = itemgetter(1),
    ) -> None:
        """Note that *calls* were compared with the records of *ranks*. Calls that have other *members* as well
        remain.
        """
        for key in calls:
            held = self._held.pop(key)
            held.looks += 1
            if held.looks < MOST_LOOKS and not all(rank in ranks for rank in members(key)):
                held.due = now + AGAIN_S
                self._held[key] = held
