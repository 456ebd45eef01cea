"""What guards saw with their own eyes and wrote into flags and notes: NaN, changed buffers, dropped handles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distsim.debug import ring as rings
from distsim.debug import seen
from distsim.debug.evidence import wall_offsets
from distsim.debug.kinds import Kind
from distsim.debug.records import CallRecord, CallWait, Evidence, Finding
from distsim.debug.ring_reader import RingReader
from distsim.strangers import printable

__all__ = ["findings", "merged"]


def findings(readers: Sequence[RingReader], evidence: Evidence, origin_wall_ns: int) -> list[Finding]:
    """Findings of all ranks, the earliest first; ranks that show the same are one finding.

    *origin_wall_ns* is second 0 of the evidence. Rings are read one after the other while the ranks go on, so
    they are read twice: what caused a thing that the first reading saw was written before the second began.
    """
    _flagged(readers, evidence, origin_wall_ns)
    found = _flagged(readers, evidence, origin_wall_ns)
    for reader in readers:
        found += _left(reader, evidence)
    return merged(found)


def _flagged(readers: Sequence[RingReader], evidence: Evidence, origin_wall_ns: int) -> list[Finding]:
    found: list[Finding] = []
    offsets = wall_offsets(readers)
    for reader in readers:
        calls = {call.index: call for call in evidence.records.get(reader.header.rank, ())}
        for flag, make in _MAKERS:
            hits = reader.hits(flag)
            if len(hits):
                call = calls.get(int(hits[0]["commit"]) - 1)
                if call is None:
                    call = reader.decode(hits[0], origin_wall_ns - offsets[reader.header.rank])
                if call.site is not None:
                    found.append(make(call))
    return found


def merged(found: Sequence[Finding]) -> list[Finding]:
    """The earliest first, ranks that show the same as one; also for the findings of several hosts."""
    kept: list[Finding] = []
    for finding in sorted(found, key=lambda finding: (finding.at_s or 0.0, finding.ranks)):
        same = next((i for i, other in enumerate(kept) if _alike(finding, other)), None)
        if same is None:
            kept.append(finding)
        elif finding.kind is not Kind.NAN:
            ranks = tuple(sorted({*kept[same].ranks, *finding.ranks}))
            kept[same] = replace(kept[same], ranks=ranks)
        elif _earlier(finding.call, kept[same].call):  # NaN spreads: the first is the one
            kept[same] = finding
    return kept


def _earlier(call: CallRecord | None, other: CallRecord | None) -> bool:
    """Within a group the number of a call says which came first, whatever the hosts' clocks say."""
    return call is not None and other is not None and call.group == other.group and call.seq < other.seq


def _left(reader: RingReader, evidence: Evidence) -> list[Finding]:
    """What the rank itself found out about its DDP model."""
    said = reader.text(rings.W_FINDING)
    if not isinstance(said, dict) or not all(isinstance(said.get(key), str) for key in ("kind", "text")):
        return []
    rank = reader.header.rank
    state = evidence.ranks.get(rank)
    if said["kind"].endswith("?"):
        # A guess from the outside: only when others wait in DDP's own all_reduce and this rank does not.
        mine = any(isinstance(w, CallWait) for w in state.waits) if state is not None else False
        others = [
            call
            for other, calls in evidence.records.items()
            if other != rank
            for call in calls[-3:]
            if call.op == "all_reduce" and not call.done and call.is_async
        ]
        if not others or (mine and state is not None and state.waits == ()):
            return []
    return [
        Finding(
            Kind.DDP_UNUSED_PARAMETER,
            (rank,),
            f"{printable(said['text'])} on rank {rank}",
            site=state.site if state is not None else None,
            at_s=None,
            suggestion="Use every parameter in the loss on every rank, or give DDP find_unused_parameters=True.",
        )
    ]


def _alike(a: Finding, b: Finding) -> bool:
    return a.kind is b.kind and (a.kind is Kind.NAN or (a.site == b.site and a.group == b.group))


_MAKERS = (
    (rings.NAN_INPUT, seen.nan),
    (rings.MODIFIED, seen.modified),
    (rings.RACE, seen.race),
    (rings.DROPPED, seen.dropped),
)
