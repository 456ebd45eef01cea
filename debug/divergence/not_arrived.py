"""A call that torch refused at its own rank, and that the rank did not make again: all later ones are a place early."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from distsim.debug.divergence.divergence import Divergence, calls_from, support
from distsim.debug.matching.index import EvidenceIndex, GroupCalls
from distsim.debug.messages import ranks_text, site_text
from distsim.debug.records import CallRecord
from distsim.debug.records.kinds import Kind

__all__ = ["refusal_advice", "refusal_text", "refused_before", "refused_call"]

NEAR = 8
"""Calls before a contradiction that are laid beside each other."""
MOST_WORDS = 120


def refused_before(index: EvidenceIndex, log: GroupCalls, divergence: Divergence) -> Divergence | None:
    """A refused call before *divergence* that explains it: one place on, the rank's calls are those of the others."""
    for first in index.refused:
        met = log.meetings.get(first.seq, {})
        if first.seq > divergence.seq or not _left_out(log, first) or first.rank not in log.meetings[divergence.seq]:
            continue
        alike = [r for r in index.refused if (r.seq, r.op) == (first.seq, first.op) and _left_out(log, r)]
        culprits = tuple(sorted({r.rank for r in alike}))
        reference = tuple(sorted(r for r, call in met.items() if r not in culprits and call.op == first.op))
        if reference and _explains(log, first.rank, reference[0], first.seq, divergence):
            return replace(
                divergence,
                kind=Kind.MISSING_RANK,
                seq=first.seq,
                culprits=culprits,
                reference=reference,
                expected=met[reference[0]],
                got=met[first.rank],
                tie=False,
                refused=first,
                borne_out=divergence.met,
                mismatch=None,
            )
    return None


def _left_out(log: GroupCalls, refused: CallRecord) -> bool:
    """Return whether it was refused between two calls of the log."""
    if refused.is_p2p or refused.group != log.group:
        return False
    calls = log.calls.get(refused.rank, ())
    after = next((call for call in calls if call.seq >= refused.seq), None)
    before = next((call for call in reversed(calls) if call.seq < refused.seq), None)
    return (
        after is not None
        and after.index > refused.index
        and after.seq == refused.seq
        and (before is None or before.index < refused.index)
    )


def _explains(log: GroupCalls, rank: int, witness: int, seq: int, divergence: Divergence) -> bool:
    """The rank's calls fit the witness's next ones, and better than they do number by number (after a retry they fit
    number by number)."""
    start = max(seq, divergence.seq - NEAR)
    mine = calls_from(log, rank, start)
    shifted = support(mine, calls_from(log, witness, start + 1), 1, exact=False)
    if shifted is None:
        return False
    until = divergence.seq - start
    straight = support(mine[:until], calls_from(log, witness, start)[:until], 1, exact=False) or 0
    one_line = divergence.got.site is not None and divergence.got.way == divergence.expected.way
    return shifted > straight or (shifted == straight and not one_line)


def refused_call(index: EvidenceIndex, call: CallRecord, ranks: Iterable[int]) -> CallRecord | None:
    """Return why *ranks* are not in *call*: a similar call was refused at each of them."""
    absent = set(ranks)
    like = [
        r
        for r in index.refused
        if r.rank in absent
        and (r.op, r.group) == (call.op, call.group)
        and (r.seq == call.seq or (r.way == call.way and r.seq <= call.seq))
    ]
    return like[0] if like and {r.rank for r in like} == absent else None


def refusal_text(refused: CallRecord, ranks: Iterable[int]) -> str:
    """`rank 0's all_gather at train.py:7 was refused by torch with TypeError: ...`."""
    who = list(ranks)
    words = (refused.error or "an exception").partition("\n")[0]
    if len(words) > MOST_WORDS:
        words = words[: MOST_WORDS - 3] + "..."
    whose = f"{ranks_text(who)}'s" if len(who) == 1 else f"of {ranks_text(who)},"
    return f"{whose} {refused.op} at {site_text(refused.site)} was refused by torch with {words.rstrip('.')}"


def refusal_advice(refused: CallRecord) -> str:
    """Return the advice."""
    return (
        f"Give the call at {site_text(refused.site)} the arguments that torch wants, and do not go on after its "
        "exception without making it again: the others wait for it."
    )
