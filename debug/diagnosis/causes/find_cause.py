"""The cause of a diagnosis that its kind alone does not tell: the first rule that the evidence bears out."""

from __future__ import annotations

from dataclasses import replace

from distsim.debug.diagnosis.causes.blocks import join_block, no_sync_block
from distsim.debug.diagnosis.causes.caught import caught_exception, repeated_calls
from distsim.debug.diagnosis.causes.cause import Cause, Sides, sides_of
from distsim.debug.diagnosis.causes.elsewhere import (
    awaited_key,
    held_lock,
    message_loop,
    other_group,
    skipped_init,
    unlike_mesh,
)
from distsim.debug.diagnosis.causes.guards import guard_by_rank, guarded_call
from distsim.debug.diagnosis.causes.iterations import generation, left_loop, loop_cause, skipped_round
from distsim.debug.diagnosis.causes.program_text import ProgramText
from distsim.debug.diagnosis.causes.resumed import resumed_elsewhere
from distsim.debug.diagnosis.causes.unordered import unordered_operands
from distsim.debug.diagnosis.context import Case
from distsim.debug.records import Phase
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind

__all__ = ["with_cause"]

SHIFTED = frozenset(
    {
        Kind.MISSING_RANK,
        Kind.EXTRA_COLLECTIVE,
        Kind.UNEVEN_ITERATIONS,
        Kind.WRONG_ORDER,
        Kind.OP_MISMATCH,
        Kind.SHAPE_MISMATCH,
        Kind.DTYPE_MISMATCH,
        Kind.P2P_UNMATCHED,
        Kind.DEADLOCK_CYCLE,
    }
)
"""Kinds that follow from calls which some ranks left out, added or made in another order."""
REORDERED = frozenset({Kind.WRONG_ORDER, Kind.OP_MISMATCH, Kind.SHAPE_MISMATCH, Kind.DTYPE_MISMATCH})

ELSEWHERE = {
    Kind.NEVER_JOINED: skipped_init,
    Kind.HOST_STUCK: held_lock,
    Kind.STRAGGLER: held_lock,
    Kind.GROUP_CREATION_ORDER: unlike_mesh,
    Kind.P2P_UNMATCHED: message_loop,
}
"""Kinds with one rule of their own."""


def with_cause(case: Case, d: Diagnosis) -> Diagnosis:
    """The diagnosis with the advice that removes its cause, where the evidence shows one."""
    known = d.kind in SHIFTED or d.kind in ELSEWHERE
    if not known or not d.culprits or _still_runs(case, d):
        return d
    if d.kind is Kind.NEVER_JOINED and case.index.evidence.unseen.issuperset(d.culprits):
        return d  # no process of theirs has run the program, as far as is known
    cause = _cause(case, d)
    if cause is None:
        return d
    says = f"{d.explanation} {cause.says}".strip()
    return replace(d, explanation=says, suggestion=cause.suggestion, causes=cause.lines)


def _cause(case: Case, d: Diagnosis) -> Cause | None:
    text = ProgramText(case.index.evidence.sources, _lines_called(case))
    if d.kind in ELSEWHERE:
        return ELSEWHERE[d.kind](case, d, text)
    if (cause := repeated_calls(case, d, text) or caught_exception(case, d, text)) is not None:
        return cause
    if d.kind in (Kind.MISSING_RANK, Kind.EXTRA_COLLECTIVE) and (cause := other_group(case, d)) is not None:
        return cause
    if d.kind is Kind.MISSING_RANK and (cause := awaited_key(case, d, text)) is not None:
        return cause
    sides = sides_of(case, d)
    if (cause := join_block(case, d, text, sides)) is not None:
        return cause
    if d.kind in REORDERED and (cause := unordered_operands(case, d, text, sides)) is not None:
        return cause
    one_sided = d.kind in (Kind.EXTRA_COLLECTIVE, Kind.MISSING_RANK)
    if one_sided and not (sides.culprits and sides.others) and (cause := _after_last_call(case, d, text)) is not None:
        return cause
    both = bool(sides.culprits) or _at_one_line(case, d)
    if one_sided and both and (cause := guard_by_rank(text, sides, d)) is not None:
        return cause
    uneven = d.kind is Kind.UNEVEN_ITERATIONS
    if uneven or d.kind in (Kind.MISSING_RANK, Kind.EXTRA_COLLECTIVE, *REORDERED):
        cause = generation(text, sides) or no_sync_block(text, sides) or resumed_elsewhere(text, sides)
    if cause is not None:
        return cause
    if one_sided:
        return _one_sided(case, d, text, sides)
    if uneven:
        return _uneven(text, sides, d)
    return _of_another_round(d, text, sides) if d.kind is Kind.SHAPE_MISMATCH else None


def _uneven(text: ProgramText, sides: Sides, d: Diagnosis) -> Cause | None:
    """What decides how often a rank goes round, or, where only the bound of the loop may, whether a round makes the
    call."""
    loop = loop_cause(text, sides, d.culprits)
    headers = {(site.file, node.lineno) for site, node in text.loops(sides.others) + text.loops(sides.culprits)}
    if loop is not None and any((site.file, site.line) not in headers for site in loop.lines):
        return loop
    guard = guard_by_rank(text, sides, d) or guarded_call(text, sides, d)
    if loop is None or guard is None:
        return loop or guard
    rest = f"{loop.suggestion[:1].lower()}{loop.suggestion[1:]}"
    return Cause(f"{guard.suggestion} If it is not: {rest}", lines=guard.lines + loop.lines)


def _one_sided(case: Case, d: Diagnosis, text: ProgramText, sides: Sides) -> Cause | None:
    """Why some ranks make a call and others do not: a condition, a round left out, a loop left early."""
    if sides.culprits and sides.others and (cause := guarded_call(text, sides, d)) is not None:
        return cause
    if d.kind is Kind.EXTRA_COLLECTIVE:
        return None
    if (cause := skipped_round(text, sides)) is not None:
        return cause
    return loop_cause(text, sides, d.culprits) if text.loops(sides.others, sides.culprits) else None


def _after_last_call(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Why a culprit that has ended, or is about to, has left the loop around its last call."""
    last = case.index.last(d.culprits[0]) if d.kind is Kind.MISSING_RANK else None
    return None if last is None else left_loop(text, last.way)


def _at_one_line(case: Case, d: Diagnosis) -> bool:
    """The ranks in the call are all at one line, so that what is around it is what let them come to it."""
    log = None if d.call is None else next((log for log in case.index.group_logs if log.group == d.group), None)
    met = {} if log is None or d.call is None else log.meetings.get(d.call.seq, {})
    return len({call.site for call in met.values()}) == 1


def _of_another_round(d: Diagnosis, text: ProgramText, sides: Sides) -> Cause | None:
    """The ranks are at one line with two shapes, in a loop whose rounds some of them may skip."""
    if sides.culprits[:1] != sides.others[:1] or (skip := skipped_round(text, sides)) is None:
        return None
    return replace(skip, suggestion=f"{skip.suggestion} If it is not: {d.suggestion[:1].lower()}{d.suggestion[1:]}")


def _lines_called(case: Case) -> frozenset[tuple[str, int]]:
    """File and line of every frame on the records."""
    ways = {record.way for rank in case.index.states for record in case.index.records(rank)}
    return frozenset((frame.file, frame.line) for way in ways for frame in way)


def _still_runs(case: Case, d: Diagnosis) -> bool:
    """A rank that only has not come yet: what it does until it comes is the question."""
    state = case.index.states.get(d.culprits[0])
    running = state is not None and state.phase is Phase.RUNNING and not state.leaving
    return running and d.kind is Kind.MISSING_RANK
