"""Comparing messages as they arrive: the n-th send of a rank to another, and the n-th receive from it.

Records carry their number within (operation, peer, tag), so the two ends of a message find each other whatever
was lost in between. A receive from any source has no such number, and its ring tells its sender only afterwards:
it shows as a receive whose number does not follow on that of the one before from this sender. From then on that
rank's receives with that tag, and all receives of a rank whose ring was overrun (what was lost may have been from
any source), are left to the diagnosis at the end; so are messages beside one that failed, which has a number but
may never have gone out. So no pair is formed that is none. Of messages between hosts the rows go to the leader,
as those of a group do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from distsim.debug.records.signature import Signature
from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import Records

__all__ = ["MARK", "PAIR", "STREAM", "GroupKey", "Messages", "StreamKey", "world_of"]

MARK = "\0"
"""Begins a key that is no group's: names of groups are printable."""
PAIR = f"{MARK}pair"
"""Begins the first word of a suspicion's key, which its world ends: (PAIR + world, (sender, receiver), index of the
send); its number is the receive's index."""
STREAM = f"{MARK}p2p"
"""First letters of a stream's key."""

GroupKey = tuple[str, tuple[int, ...], int]
"""Name, members and generation of a group."""
StreamKey = tuple[str, tuple[int, ...], int]
"""Group, (sender, receiver) and tag: of the form of a group's key, so that other hosts get its rows the same way."""
Row = Sequence[int]
"""(2 * number + 1 for a send or 0 for a receive, hash of bytes and dtype, index of the record)."""

MOST_WAITING = 65536
"""Messages of which one end was seen; the oldest are forgotten (an end that never comes stays for ever)."""
MOST_KNOWN = 65536


class Messages:
    """Holds the messages of which only one end was seen."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[StreamKey, int], tuple[int, int]] = {}
        """(stream, first word of the row) -> the other two."""
        self._forgotten: dict[tuple[StreamKey, int], int] = {}
        """(stream, 1 for sends) -> first word of the last row that had to make room."""
        self._received: dict[StreamKey, int] = {}
        """Number of the last receive, the stream used last at the end."""
        self._loose: set[tuple[str, int, int]] = set()
        """(group, receiver, tag) whose receives cannot be told apart."""
        self._lossy: set[tuple[str, int]] = set()
        """(group, rank) of which messages were overwritten before they were read."""
        self._next: dict[Hashable, int] = {}
        """Process -> index of its next record."""
        self._gaps: set[Hashable] = set()
        self._seen: dict[tuple[str, int], int] = {}
        self._names: dict[GroupKey, str] = {}
        self._ends: dict[int, tuple[int, int]] = {}
        """Fingerprint -> (1 for a send, hash of bytes and dtype)."""
        self._patterns: dict[tuple[tuple[int, ...], int, int], int] = {}
        self._found: list[tuple[StreamKey, int, int]] = []
        """(stream, index of the send, of the receive)."""
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
        """Take new calls of a process, all of them: a gap in their numbers is what an overrun leaves."""
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
        found = self._names.get(key)
        if found is None:
            name, ranks, generation = key
            found = self._names[key] = f"{STREAM}{name}/{generation}/{crc32(repr(ranks).encode())}"
        return found

    def _sort(
        self, rank: int, group: str, calls: Records, signature_of: Callable[[int, int], Signature], has_gaps: bool
    ) -> dict[StreamKey, list[Row]]:
        """The rows of each stream that can be compared."""
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
        """Whether a receive is the next of its stream; if not, one from any source was among them."""
        last = self._received.pop(stream, 0)
        if stream[1][0] < 0 or ordinal != last + 1:
            self._leave_out(stream)
            return False
        self._received[stream] = ordinal  # behind those that have rested longer
        if len(self._received) > MOST_KNOWN:  # one that comes again will not follow, and is left to the end
            _drop_oldest(self._received)
        return True

    def _leave_out(self, stream: StreamKey) -> None:
        group, (_, receiver), tag = stream
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
        """Take messages of a process that failed, by now: those behind them may be one off."""
        self._learn(calls, signature_of)
        for call in calls:
            key, end = key_of(int(call["group"])), self._ends.get(int(call["fingerprint"]))
            if key is not None:
                receiver = int(call["peer"]) if end is not None and end[0] else rank_in(key)
                self._leave_out((self._name(key), (-1, receiver), int(call["tag"])))

    def _learn(self, calls: Records, signature_of: Callable[[int, int], Signature]) -> None:
        """What is sent or received, once for each new fingerprint."""
        prints, places = np.unique(calls["fingerprint"][::-1], return_index=True)
        for print_, place in zip(prints.tolist(), places.tolist(), strict=True):
            if print_ in self._ends:
                continue
            said = signature_of(int(calls["signature"][len(calls) - 1 - place]), print_)
            if said.op in ("send", "recv"):
                payload = rings.fingerprint((said.nbytes, said.dtypes[:1]), False)
                self._ends[print_] = int(said.op == "send"), payload
        if len(self._ends) > MOST_KNOWN:
            fresh = {print_: self._ends[print_] for print_ in prints.tolist() if print_ in self._ends}
            self._ends = fresh

    def feed_rows(self, stream: StreamKey, rows: Iterable[Row]) -> None:
        """Take rows of one end of a stream, from a ring or from another host's monitor."""
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
        """The same again is looked at more and more seldom: the first look may have come too late."""
        if len(self._patterns) > MOST_KNOWN:
            self._patterns.clear()
        pattern = stream[1], send[0], recv[0]
        times = self._patterns[pattern] = self._patterns.get(pattern, 0) + 1
        if times & (times - 1) == 0:
            self._found.append((stream, send[1], recv[1]))

    def check(self) -> list[tuple[StreamKey, int]]:
        """Pairs that do not fit, found since the last time."""
        found, self._found = self._found, []
        return [
            ((PAIR + world_of(stream), stream[1], send), recv)
            for stream, send, recv in found
            if not self._left_out(stream)
        ]


def world_of(key: GroupKey | StreamKey) -> str:
    """Identifier of the world whose ranks are in a key of a group, of a stream or of a pair; empty: the launcher's."""
    name = key[0]
    if name.startswith(PAIR):
        return name.removeprefix(PAIR)
    found = _WORLD.match(name.removeprefix(STREAM))
    return found[1] if found else ""


_WORLD = re.compile(r"([0-9a-f]{12}):")


def _drop_oldest(table: dict[Any, Any]) -> list[Any]:
    """A quarter at once: a dictionary finds its first entry slowly when many before it were taken away."""
    oldest = list(islice(table, len(table) // 4 + 1))
    for key in oldest:
        del table[key]
    return oldest
