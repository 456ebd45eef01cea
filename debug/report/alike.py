"""Ranks that raised alike but for the numbers in their messages: one is told in full, the others in a line."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.debug.messages.phrases import some_ranks_text
from distsim.debug.records import Evidence
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.debug.report.stack_tree import blank_addresses
from distsim.text.fold_tracebacks import but_for_numbers, first_difference, others_differ

__all__ = ["and_others", "told_once"]


def told_once(diagnoses: Sequence[Diagnosis], evidence: Evidence | None) -> list[list[Diagnosis]]:
    """The diagnoses in their order, those together that differ from an earlier one in numbers only."""
    groups: list[list[Diagnosis]] = []
    first: dict[str, list[Diagnosis]] = {}
    for d in diagnoses:
        said = None if evidence is None or d.kind is not Kind.RANK_RAISED else _said(d, evidence)
        known = None if said is None else first.get(but_for_numbers(said))
        if known is not None and (not d.stuck or d.stuck == known[0].stuck):  # who waits for it is told there
            known.append(d)
            continue
        groups.append([d])
        if said is not None:
            first.setdefault(but_for_numbers(said), groups[-1])
    return groups


def and_others(first: Diagnosis, others: Sequence[Diagnosis], evidence: Evidence, rest: str) -> str:
    """The line for those that are not told in full as *first* is; *rest* is what has them."""
    ranks = sorted({rank for d in others for rank in d.culprits})
    last = max(others, key=lambda d: max(d.culprits))
    who = "" if len(others) == 1 else f", {some_ranks_text(ranks)} (all of them: {rest})"
    said = first_difference(_said(first, evidence) or "", _said(last, evidence) or "")
    return f"... and {others_differ(len(others))}{who}; {some_ranks_text(last.culprits)}: {said}"


def _said(d: Diagnosis, evidence: Evidence) -> str | None:
    """The one traceback of all culprits; None where some left none, or another one."""
    texts = {None if (state := evidence.ranks.get(rank)) is None else state.traceback for rank in d.culprits}
    text = next(iter(texts)) if len(texts) == 1 else None
    return blank_addresses(text) if text else None
