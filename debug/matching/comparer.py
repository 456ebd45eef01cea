"""Comparing calls as they arrive: arrays of fingerprints, a group at a time.

Ranks that agree cost a numpy comparison a poll. Only a set of fingerprints (or of call sites) that was
never seen before is looked at call by call. Messages are compared in `message_comparer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.debug.matching.message_comparer import STREAM, GroupKey, Messages
from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import Records

__all__ = ["Comparer", "GroupKey", "Suspicion"]

Numbers = NDArray[np.uint64]


@dataclass(frozen=True)
class Suspicion:
    """Calls with one number whose fingerprints (or lines) were never seen together before; or the two ends of a
    message, of the form that `message_comparer.PAIR` says."""

    key: GroupKey
    seq: int
    lines_only: bool
    """The calls are alike; only the lines they come from are not."""


@dataclass
class _Uncompared:
    """One group's calls that not all its members have made yet."""

    key: GroupKey
    done: int = 0
    """Every member has made this many calls, and they were compared."""
    waiting: dict[int, list[Numbers]] = field(default_factory=dict)
    """Rank -> arrays of (seq, fingerprint, site hash) rows, in order."""
    known: set[bytes] = field(default_factory=set)


class Comparer:
    """Holds, for each group, the calls that not all members have made yet."""

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
        """Take new calls of a process; *key_of(table offset)* answers the group's key, None: not compared;
        *signature_of(position, fingerprint)* what a message was asked to do.
        *route(rank, key, rows)* may take them away, to be compared on another host. *rank_in(key)* is the process's
        rank in the world whose numbers the key's members are; without it *process* is its rank."""
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
        """Take rows of (seq, fingerprint, site hash), from a ring or from another host's monitor; or a message's."""
        if key[0].startswith(STREAM):
            self.messages.feed_rows(key, rows.tolist())
            return
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Uncompared(key)
        group.waiting.setdefault(rank, []).append(rows)
        self._touched.add(key)

    def check(self) -> list[Suspicion]:
        """Compare what all members have made by now."""
        found = [Suspicion(key, index, lines_only=False) for key, index in self.messages.check()]
        touched, self._touched = self._touched, set()
        for key in sorted(touched):
            group = self._groups[key]
            if all(rank in group.waiting for rank in key[1]):
                found += self._compare(group)
        return found

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
            inside = mine[(mine[:, 0] >= start) & (mine[:, 0] <= end)]
            if len(inside) != end - start + 1:
                # A ring was overrun or threads wrote out of order: sort, keep one row a number.
                order = np.argsort(inside[:, 0], kind="stable")
                inside = inside[order]
            parts.append(inside)
            rest = mine[mine[:, 0] > end]
            group.waiting[rank] = [rest] if len(rest) else []
            if not len(rest):
                del group.waiting[rank]
        if len({len(part) for part in parts}) > 1 or any((p[:, 0] != parts[0][:, 0]).any() for p in parts):
            parts = _common(parts)
        group.done = end
        stacked = np.stack(parts)  # rank, call, (seq, fingerprint, site)
        self.compared += stacked.shape[1]
        prints, sites = stacked[:, :, 1], stacked[:, :, 2]
        odd_prints = (prints != prints[0]).any(axis=0) | ((prints[0] & 1) == 1)
        odd_sites = (sites != sites[0]).any(axis=0)
        found = []
        for place in np.flatnonzero(odd_prints | odd_sites):
            pattern = stacked[:, place, 1:].tobytes()
            if pattern in group.known:
                continue
            if len(group.known) > 65536:
                group.known.clear()
            group.known.add(pattern)
            found.append(Suspicion(group.key, int(stacked[0, place, 0]), lines_only=not odd_prints[place]))
        return found

    def progress(self) -> Iterable[tuple[GroupKey, int]]:
        """Every group and how far all its members have come together."""
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
