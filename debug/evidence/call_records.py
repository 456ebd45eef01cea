"""The calls that matter, out of the rings of all ranks: what each group did last, and whatever is unfinished."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from distsim.debug.records import CallRecord
from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import GroupEntry, Records, RingReader
from distsim.debug.rings.world import WorldKind

__all__ = ["call_records"]

HISTORY = 48
"""Calls before the last common one of each group that a diagnosis may look at."""
MANY_RANKS_WINDOW = 1024
"""Calls of each rank that are read where there are many ranks: what all wait for is among the last."""


def call_records(
    readers: Sequence[RingReader],
    origins: Mapping[int, int],
    focus: Mapping[tuple[Any, ...], int] | None = None,
) -> dict[int, list[CallRecord]]:
    """The calls that a diagnosis needs, decoded: of each group the last ones that all its members still
    have, and everything unfinished. *focus* holds numbers (by group key) that must be among them."""
    tails: dict[int, Records] = {}
    seen: dict[tuple[Any, ...], dict[int, tuple[int, int]]] = defaultdict(dict)
    overrun: dict[int, bool] = {}
    newest: dict[tuple[Any, ...], int] = {}
    members: dict[tuple[Any, ...], Sequence[int]] = {}
    current = {_default_world(reader) for reader in readers}
    window = rings.RECORDS if len(readers) <= 64 else MANY_RANKS_WINDOW
    for reader in readers:
        rank = reader.number
        start = max(reader.count - window, 0)
        records, _ = reader.since(start)
        if start:
            older = reader.unfinished()
            records = np.concatenate([older[older["commit"] <= start], records])
        tails[rank] = records
        overrun[rank] = reader.count >= window
        collective = (records["flags"] & rings.OF_TWO) == 0
        for offset in np.unique(records["group"]):
            entry = reader.group(int(offset))
            numbers = records["seq"][(records["group"] == offset) & collective]
            name = entry.key[:2]
            newest[name] = max(newest.get(name, 0), entry.generation)
            members[entry.key] = reader.in_job(entry)
            if len(numbers):
                seen[entry.key][rank] = (int(numbers.min()), int(numbers.max()))
    cuts = {key: _cut(members[key], spans, overrun, (focus or {}).get(key)) for key, spans in seen.items()}
    found: dict[int, list[CallRecord]] = {}
    budget = max(64, 32768 // max(len(readers), 1))
    for reader in readers:
        rank = reader.number
        found[rank] = _decode(reader, tails[rank], cuts, newest, current, origins[rank], budget)
    return found


def _default_world(reader: RingReader) -> str:
    return next((world.id for world in reversed(reader.worlds) if world.kind is WorldKind.DEFAULT), "")


def _is_over(reader: RingReader, world: str, current: Collection[str]) -> bool:
    """Every process has left a default group's world."""
    own = reader.world(world)
    return own is not None and own.kind is WorldKind.DEFAULT and world not in current


def _cut(
    ranks: Sequence[int], spans: Mapping[int, tuple[int, int]], overrun: Mapping[int, bool], focus: int | None
) -> int:
    """First number of a group to look at: all members must have it, or have overwritten nothing."""
    members = [rank for rank in ranks if rank in overrun]
    common = min((spans[rank][1] if rank in spans else 0) for rank in members) if members else 0
    if any(rank not in spans and overrun[rank] for rank in members):
        common = max(last for _, last in spans.values())  # somebody's calls on it are overwritten: only the last count
    start = max(common - HISTORY, 1)
    if focus is not None:
        start = min(start, max(focus - HISTORY, 1))
    oldest = max((spans[rank][0] for rank in spans if overrun.get(rank)), default=1)
    return max(start, oldest)


def _decode(
    reader: RingReader,
    records: Records,
    cuts: Mapping[tuple[Any, ...], int],
    newest: Mapping[tuple[Any, ...], int],
    current: Collection[str],
    origin_ns: int,
    budget: int,
) -> list[CallRecord]:
    keep = np.zeros(len(records), dtype=bool)
    p2p = (records["flags"] & rings.OF_TWO) != 0
    keep |= p2p
    for offset in np.unique(records["group"]):
        entry: GroupEntry = reader.group(int(offset))
        mine = records["group"] == offset
        if entry.generation < newest.get(entry.key[:2], 0) or _is_over(reader, entry.world, current):
            keep &= ~mine
            continue
        keep |= mine & ~p2p & (records["seq"] >= cuts.get(entry.key, 1))
    keep |= (records["flags"] & rings.STATE_MASK) < rings.COMPLETED
    chosen = np.flatnonzero(keep)
    if len(chosen) > budget:  # the unfinished ones, then the newest
        ended = (records["flags"][chosen] & rings.STATE_MASK) >= rings.COMPLETED
        surplus = np.flatnonzero(ended)[: len(chosen) - budget]
        chosen = np.delete(chosen, surplus)
    return [reader.decode(values, origin_ns) for values in records[chosen].tolist()]
