"""Comparing calls as they arrive: arrays of fingerprints, a group at a time.

Ranks that agree cost a numpy comparison a poll. Only a set of fingerprints (or of call sites) that was
never seen before is looked at call by call. Messages are compared in `compare_p2p`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.debug.matching.message_comparer import STREAM, Messages
from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import Records

__all__ = ["Comparer", "LaneKey", "Suspicion"]

LaneKey = tuple[str, tuple[int, ...], int]
"""Name, members and generation of a group."""
Numbers = NDArray[np.uint64]


@dataclass(frozen=True)
class Suspicion:
    """Calls with one number whose fingerprints (or lines) were never seen together before; or the two ends of a
    message, of the form that `compare_p2p.PAIR` says."""

    lane: LaneKey
    seq: int
    lines_only: bool
    """The calls are alike; only the lines they come from are not."""


@dataclass
class _Lane:
    key: LaneKey
    done: int = 0
    """Every member has made this many calls, and they were compared."""
    waiting: dict[int, list[Numbers]] = field(default_factory=dict)
    """Rank -> arrays of (seq, fingerprint, site hash) rows, in order."""
    known: set[bytes] = field(default_factory=set)


class Comparer:
    """Holds, for each group, the calls that not all members have made yet."""

    def __init__(self) -> None:
        self._lanes: dict[LaneKey, _Lane] = {}
        self._touched: set[LaneKey] = set()
        self.messages = Messages()
        self.compared = 0

    def feed(self, rank: int, records: Records, lane_of: Any, signature_of: Any, route: Any = None) -> None:
        """Take new calls of a rank; *lane_of(table offset)* answers the group's key, None: not compared;
        *signature_of(position, fingerprint)* what a message was asked to do.
        *route(rank, key, rows)* may take them away, to be compared on another host."""
        self.messages.feed(rank, records, lane_of, signature_of, route)
        collective = records[(records["flags"] & (rings.P2P_CALL | rings.REJECTED)) == 0]
        if not len(collective):
            return
        for offset in np.unique(collective["group"]):
            key = lane_of(int(offset))
            if key is None:
                continue
            mine = collective[collective["group"] == offset]
            rows = np.stack([mine["seq"], mine["fingerprint"], mine["site_hash"]], axis=1)
            if route is None or not route(rank, key, rows):
                self.feed_rows(rank, key, rows)

    def feed_rows(self, rank: int, key: LaneKey, rows: Numbers) -> None:
        """Take rows of (seq, fingerprint, site hash), from a ring or from another host's monitor; or a message's."""
        if key[0].startswith(STREAM):
            self.messages.feed_rows(key, rows.tolist())
            return
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(key)
        lane.waiting.setdefault(rank, []).append(rows)
        self._touched.add(key)

    def check(self) -> list[Suspicion]:
        """Compare what all members have made by now."""
        found = [Suspicion(key, index, lines_only=False) for key, index in self.messages.check()]
        touched, self._touched = self._touched, set()
        for key in sorted(touched):
            lane = self._lanes[key]
            if len(lane.waiting) == len(key[1]):
                found += self._compare(lane)
        return found

    def _compare(self, lane: _Lane) -> list[Suspicion]:
        ranks = lane.key[1]
        rows = {rank: np.concatenate(lane.waiting[rank]) for rank in ranks}
        start = max(int(r[0, 0]) for r in rows.values())
        end = min(int(r[-1, 0]) for r in rows.values())
        if end < start:
            for rank in ranks:
                lane.waiting[rank] = [rows[rank]]
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
            lane.waiting[rank] = [rest] if len(rest) else []
            if not len(rest):
                del lane.waiting[rank]
        if len({len(part) for part in parts}) > 1 or any((p[:, 0] != parts[0][:, 0]).any() for p in parts):
            parts = _common(parts)
        lane.done = end
        stacked = np.stack(parts)  # rank, call, (seq, fingerprint, site)
        self.compared += stacked.shape[1]
        prints, sites = stacked[:, :, 1], stacked[:, :, 2]
        odd_prints = (prints != prints[0]).any(axis=0) | ((prints[0] & 1) == 1)
        odd_sites = (sites != sites[0]).any(axis=0)
        found = []
        for place in np.flatnonzero(odd_prints | odd_sites):
            pattern = stacked[:, place, 1:].tobytes()
            if pattern in lane.known:
                continue
            if len(lane.known) > 65536:
                lane.known.clear()
            lane.known.add(pattern)
            found.append(Suspicion(lane.key, int(stacked[0, place, 0]), lines_only=not odd_prints[place]))
        return found

    def lanes(self) -> Iterable[tuple[LaneKey, int]]:
        """Every group and how far all its members have come together."""
        return ((lane.key, lane.done) for lane in self._lanes.values())


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
