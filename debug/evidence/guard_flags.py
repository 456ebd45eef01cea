"""Reads the flags and notes that guards write into rings: NaN, modified buffers, dropped handles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distsim.debug.evidence import guard_findings as seen
from distsim.debug.evidence.guard_findings import forked_calls
from distsim.debug.records import CallRecord, Evidence, Finding
from distsim.debug.records.kinds import Kind
from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import Records, RingReader, wall_offsets

MOST_LINES = 16
"""Maximum number of lines of one rank that are reported for one kind of finding."""


def findings(readers: Sequence[RingReader], evidence: Evidence, origin_wall_ns: int) -> list[Finding]:
    """Return the findings of all ranks, the earliest first; equal findings of several ranks are merged.

    *origin_wall_ns* is second 0 of the evidence. Rings are read one after the other while the ranks continue, so
    they are read twice: the cause of whatever the first reading saw was written before the second began.
    """
    _flagged(readers, evidence, origin_wall_ns)
    all_findings = _flagged(readers, evidence, origin_wall_ns)
    for reader in readers:
        all_findings += _left(reader, evidence)
    return merged([*all_findings, *forked_calls(readers)])


def _flagged(readers: Sequence[RingReader], evidence: Evidence, origin_wall_ns: int) -> list[Finding]:
    result: list[Finding] = []
    offsets = wall_offsets(readers)
    for reader in readers:
        calls = {call.index: call for call in evidence.records.get(reader.number, ())}
        for flag, make in _MAKERS:
            for hit in _one_a_line(reader.hits(flag), flag):
                call = calls.get(int(hit["commit"]) - 1)
                if call is None:
                    call = reader.decode(hit, origin_wall_ns - offsets[reader.number])
                if call.site is not None:
                    result.append(make(call))
    return result


def _one_a_line(hits: Records, flag: int) -> list[Any]:
    """Return the first call of every line and group; of NaN the first of all: it spreads."""
    if flag == rings.NAN_INPUT:
        return list(hits[:1])
    _, first = np.unique(hits[["site", "group"]], return_index=True)
    return [hits[index] for index in sorted(first)[:MOST_LINES]]


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Return the earliest first, ranks that show the same as one; also for the findings of several hosts."""
    kept: list[Finding] = []
    for finding in sorted(findings, key=lambda finding: (finding.at_s or 0.0, finding.ranks)):
        same = next((i for i, other in enumerate(kept) if _alike(finding, other)), None)
        if same is None:
            kept.append(finding)
        elif finding.kind is Kind.THREAD_RACE:
            continue  # what two threads do to each other they do on every rank, and again and again
        elif finding.kind is not Kind.NAN:
            ranks = tuple(sorted({*kept[same].ranks, *finding.ranks}))
            kept[same] = replace(kept[same], ranks=ranks)
        elif _earlier(finding.call, kept[same].call):  # NaN spreads: the first is the one
            kept[same] = finding
    return kept


def _earlier(call: CallRecord | None, other: CallRecord | None) -> bool:
    """Return which call was earlier: by number within a group, because clocks of hosts differ."""
    return call is not None and other is not None and call.group == other.group and call.seq < other.seq


def _left(reader: RingReader, evidence: Evidence) -> list[Finding]:
    """Return the findings that the rank itself recorded about its DDP model."""
    finding = reader.text(rings.W_FINDING, dict[str, str]) or {}
    if not finding.keys() >= {"kind", "text"}:
        return []
    rank = reader.number
    state = evidence.ranks.get(rank)
    guess = finding["kind"].endswith("?")
    if guess and (reader.word(rings.W_GUESSED) != reader.count + 1 or not _others_reduce(rank, evidence)):
        return []
    return [
        Finding(
            Kind.DDP_UNUSED_PARAMETER,
            (rank,),
            f"{finding['text']} on rank {rank}",
            site=state.site if state is not None else None,
            suggestion="Use every parameter in the loss on every rank, or give DDP find_unused_parameters=True.",
            guess=guess,  # a look from outside: another backward may bring the gradient
        )
    ]


def _others_reduce(rank: int, evidence: Evidence) -> bool:
    """Return whether other ranks are in all_reduces such as DDP's, which this rank has not reached."""
    return any(
        call.op == "all_reduce" and not call.done and call.is_async
        for other, calls in evidence.records.items()
        if other != rank
        for call in calls[-3:]
    )


def _alike(a: Finding, b: Finding) -> bool:
    if a.kind is not b.kind or a.kind is Kind.NAN:
        return a.kind is b.kind
    return a.group == b.group and (a.site == b.site or a.kind is Kind.THREAD_RACE)


_MAKERS = (
    (rings.NAN_INPUT, seen.nan),
    (rings.MODIFIED, seen.modified),
    (rings.RACE, seen.race),
    (rings.DROPPED, seen.dropped),
    (rings.ALIASED, seen.aliased),
)
