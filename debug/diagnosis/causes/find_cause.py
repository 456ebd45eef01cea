"""The cause of a diagnosis that its kind alone does not tell: the first rule that the evidence bears out."""

from __future__ import annotations

from dataclasses import replace

from distsim.debug.diagnosis.causes.blocks import join_block, no_sync_block
from distsim.debug.diagnosis.causes.caught import caught_exception
from distsim.debug.diagnosis.causes.cause import Cause, sides_of
from distsim.debug.diagnosis.causes.iterations import generation, loop_cause
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


def with_cause(case: Case, d: Diagnosis) -> Diagnosis:
    """The diagnosis with the advice that removes its cause, where the evidence shows one."""
    if d.kind not in SHIFTED or not d.culprits or _still_runs(case, d):
        return d
    cause = _cause(case, d)
    if cause is None:
        return d
    says = f"{d.explanation} {cause.says}".strip()
    return replace(d, explanation=says, suggestion=cause.suggestion, causes=cause.lines)


def _cause(case: Case, d: Diagnosis) -> Cause | None:
    text = ProgramText(case.index.evidence.sources)
    if (cause := caught_exception(case, d, text)) is not None:
        return cause
    sides = sides_of(case, d)
    if (cause := join_block(case, d, text, sides)) is not None:
        return cause
    if d.kind in REORDERED and (cause := unordered_operands(case, d, text, sides)) is not None:
        return cause
    uneven = d.kind is Kind.UNEVEN_ITERATIONS
    if uneven or d.kind in (Kind.MISSING_RANK, Kind.EXTRA_COLLECTIVE, *REORDERED):
        cause = generation(text, sides) or no_sync_block(text, sides) or resumed_elsewhere(text, sides)
    return cause or (loop_cause(text, sides, d.culprits) if uneven else None)


def _still_runs(case: Case, d: Diagnosis) -> bool:
    """A rank that only has not come yet: what it does until it comes is the question."""
    state = case.index.states.get(d.culprits[0])
    running = state is not None and state.phase is Phase.RUNNING and not state.leaving
    return running and d.kind is Kind.MISSING_RANK
