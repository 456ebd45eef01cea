"""Ranks by time: a lane a rank, or, of many ranks, one for all that do the same.

A slice is `[lane, kind, from_s, to_s, text, call]`; *kind* is compute, communication, waiting (for the other members),
failed, or open: a call that never ended. *call* is a place in `calls`, or null. Short slices that stand side by
side are one, with their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from distsim.debug.messages import call_text, place, shape_of_call
from distsim.debug.records import CallRecord, State
from distsim.report.html.collect.material import Material
from distsim.text.ranks import format_ranks

__all__ = ["MOST_LANES", "lanes", "thinned"]

MOST_LANES = 64
MOST_SLICES = 9_000
"""Of all lanes: what a browser moves smoothly."""
FINEST = 2_000
"""Slices shorter than such a part of the run are merged with neighbours of their kind."""
MOST_FRAMES = 12

Slice = tuple[str, float, float, str, CallRecord | None]


def lanes(material: Material, left_out: dict[str, str]) -> dict[str, Any]:
    """`lanes`, `slices`, `calls`."""
    ranks = sorted({*material.records, *material.compute, *(r for r in material.gpus if material.gpus.get(r))})
    groups = [[rank] for rank in ranks]
    if len(ranks) > MOST_LANES:
        groups = _alike(material, ranks)
        left_out["lanes"] = (
            f"One lane for ranks that make the same calls: {len(groups)} kinds of {len(ranks):,} ranks; "
        )
        left_out["lanes"] += "the times are those of the lowest rank."
    if len(groups) > MOST_LANES:
        accused = {rank for d in material.diagnoses for rank in d.culprits}
        order = sorted(groups, key=lambda g: (accused.isdisjoint(g), -len(g), g[0]))
        rest = sum(len(group) for group in order[MOST_LANES:])
        groups = sorted(order[:MOST_LANES])
        left_out["lanes"] += f" {rest:,} ranks of {len(order) - MOST_LANES:,} more kinds are left out."
    slices: list[list[Any]] = []
    calls: list[dict[str, Any]] = []
    numbers: dict[int, int] = {}
    met = _meetings(material)
    each = max(20, MOST_SLICES // max(1, len(groups)))
    for lane, group in enumerate(groups):
        for kind, begin, end, text, call in thinned(list(_slices(material, group[0], met)), material.end_s, each):
            number = None
            if call is not None:
                if id(call) not in numbers:
                    numbers[id(call)] = len(calls)
                    calls.append(_call(call))
                number = numbers[id(call)]
            slices.append([lane, kind, _s(begin), _s(end), text, number])
    stands = [sum(len(material.alike.get(rank, (rank,))) - 1 for rank in group) for group in groups]
    return {
        "lanes": [
            {"ranks": group, "name": _name(group) + (f", for {others:,} that did not run" if others else "")}
            for group, others in zip(groups, stands, strict=True)
        ],
        "slices": slices,
        "calls": calls,
    }


def _name(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs = format_ranks(ranks)
    return f"ranks {runs}" if len(runs) <= 24 else f"{len(ranks):,} ranks from {ranks[0]}"


def _alike(material: Material, ranks: Sequence[int]) -> list[list[int]]:
    """Ranks by what they call, where, and how far they came."""
    found: dict[tuple[object, ...], list[int]] = {}
    states = {} if material.evidence is None else material.evidence.ranks
    for rank in ranks:
        state = states.get(rank)
        calls = (
            (r.op, r.nbytes, r.state, None if r.site is None else (r.site.file, r.site.line))
            for r in material.records.get(rank, ())
        )
        key = (hash(tuple(calls)), None if state is None else (state.phase, state.site))
        found.setdefault(key, []).append(rank)
    return sorted(found.values())


Met = dict[tuple[str, int, str], float]


def _meetings(material: Material) -> Met:
    """When the last member came to each collective that all came to: a guard does not record it."""
    came: dict[tuple[str, int, str], list[float]] = {}
    sizes: dict[tuple[str, int, str], int] = {}
    for records in material.records.values():
        for record in records:
            if record.started_s is None and not record.is_p2p and not record.rejected:
                key = (record.group.name, record.seq, record.op)
                came.setdefault(key, []).append(record.issued_s)
                sizes[key] = len(record.members)
    return {key: max(times) for key, times in came.items() if len(times) >= sizes[key]}


def _slices(material: Material, rank: int, met: Met) -> Iterable[Slice]:
    for begin, end, what in material.compute.get(rank, ()):
        yield "compute", begin, end, what, None
    on_gpu: set[int] = set()
    for track in material.gpus.get(rank) or ():
        for piece in track.slices:
            if not piece.records:
                yield "compute", piece.begun_s, piece.ended_s, piece.name, None
                continue
            on_gpu.update(id(record) for record in piece.records)
            first = piece.records[0]
            begun = min((r.started_s for r in piece.records if r.started_s is not None), default=piece.begun_s)
            yield from _call_slices(first, piece.begun_s, min(max(begun, piece.begun_s), piece.ended_s), piece.ended_s)
    for record in material.records.get(rank, ()):
        if record.rejected or id(record) in on_gpu:
            continue
        if not record.done:
            started = record.issued_s if record.started_s is None else record.started_s
            if started > record.issued_s:
                yield "waiting", record.issued_s, started, _text(record), record
            yield "open", started, max(started, material.end_s), _text(record), record
        else:
            # Some dumps know that a call has ended, and not when.
            ended = record.issued_s if record.completed_s is None else record.completed_s
            came = met.get((record.group.name, record.seq, record.op), record.issued_s)
            all_there = came if record.started_s is None else record.started_s
            yield from _call_slices(record, record.issued_s, min(all_there, ended), ended)


def _call_slices(record: CallRecord, issued_s: float, started_s: float, completed_s: float) -> Iterable[Slice]:
    text = _text(record)
    if started_s > issued_s:
        yield "waiting", issued_s, started_s, text, record
    if completed_s > started_s or started_s <= issued_s:
        kind = "failed" if record.state is State.FAILED else "communication"
        yield kind, max(started_s, issued_s), completed_s, text, record


def _text(record: CallRecord) -> str:
    return call_text(record) if record.is_p2p else f"{call_text(record)} on {record.group.label}"


def thinned(slices: list[Slice], end_s: float, most: int) -> list[Slice]:
    """Short neighbours of one kind merged, ever longer ones until *most* are left."""
    slices.sort(key=lambda piece: piece[1:3])
    width = end_s / FINEST
    while len(slices) > most:
        last: dict[str, int] = {}
        counts: dict[int, int] = {}
        merged: list[Slice] = []
        for piece in slices:
            kind, begin, end, _, _ = piece
            at = last.get(kind)
            if at is not None and kind != "open" and end - begin < width and begin - merged[at][2] < width:
                counts[at] = counts.get(at, 1) + 1
                merged[at] = (kind, merged[at][1], max(end, merged[at][2]), merged[at][3], merged[at][4])
                continue
            last[kind] = len(merged)
            merged.append(piece)
        slices = [
            (kind, begin, end, f"{text.partition(' … ')[0]} … and {counts[i] - 1:,} more", call)
            if i in counts
            else piece
            for i, piece in enumerate(merged)
            for kind, begin, end, text, call in (piece,)
        ]
        width *= 2
        if width > 4 * end_s:
            break
    return slices[:most]


def _call(record: CallRecord) -> dict[str, Any]:
    """What a click shows."""
    facts: dict[str, Any] = {
        "rank": record.rank,
        "call": _text(record),
        "what": shape_of_call(record),
        "bytes": record.nbytes,
        "state": record.state.value,
        "issued_s": _s(record.issued_s),
        "started_s": None if record.started_s is None else _s(record.started_s),
        "completed_s": None if record.completed_s is None else _s(record.completed_s),
        "line": None if record.site is None else place(record.site, function=True),
        "stack": [place(site, function=True) for site in record.stack[:MOST_FRAMES]],
    }
    if record.thread != "MainThread":
        facts["thread"] = record.thread
    if record.is_async:
        facts["async"] = "waited for" if record.waited else "not waited for"
    if record.error:
        facts["error"] = record.error[:500]
    return facts


def _s(seconds: float) -> float:
    """To the nanosecond."""
    return round(seconds, 9)
