"""Contradictions between the calls of one group, in words."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.debug.advice import advice
from distsim.debug.case import Case
from distsim.debug.divergence import Divergence
from distsim.debug.explain import are, call_text, capital, group_text, place, ranks_text, shape_of_call
from distsim.debug.kinds import Kind
from distsim.debug.records import CallRecord
from distsim.debug.verdict import Diagnosis

__all__ = ["contradiction"]


def contradiction(case: Case, divergence: Divergence, victims: Sequence[int]) -> Diagnosis:
    """The diagnosis of the first number at which a group's members are not in the same call."""
    d = divergence
    who, others = ranks_text(d.culprits), ranks_text(d.reference)
    second = f"{capital(others)} {are(d.reference, 'is', 'are')} in {_at(d.expected)}."
    if d.tie:
        second = f"{second[:-1]}; as many here as there, so nothing but rank order says who is wrong."
    met = d.lane.meetings.get(d.seq, {})
    return case.diagnosis(
        d.kind,
        d.culprits,
        victims,
        call=d.got if d.kind is Kind.EXTRA_COLLECTIVE else d.expected,
        group=d.lane.group,
        explanation=f"{capital(_what(d))} {second}",
        suggestion=advice(d.kind, who=who, mine=place(d.got.site), theirs=place(d.expected.site)),
        since_s=max(d.got.issued_s, d.expected.issued_s),
        sites={rank: site for rank, record in met.items() if (site := record.site) is not None},
    )


def _at(record: CallRecord) -> str:
    return f"{shape_of_call(record)} at {place(record.site)}"


def _what(d: Divergence) -> str:
    who, on = ranks_text(d.culprits), f"on {group_text(d.lane.group)}"
    they = "it is" if len(d.culprits) == 1 else "they are"
    match d.kind:
        case Kind.MISSING_RANK:
            there = place(d.expected.site)
            return f"{who} never called {call_text(d.expected)} {on}, at {there}: {they} in {_at(d.got)}."
        case Kind.EXTRA_COLLECTIVE:
            there = place(d.got.site)
            return f"{who} called {call_text(d.got)} {on}, at {there}, which the others do not call there."
        case Kind.WRONG_ORDER:
            return (
                f"{who} called {_at(d.got)} as number {d.seq} {on}, where the others make another call first."
            )
        case Kind.THREAD_RACE:
            return (
                f"{who} issued calls {on} from several threads, in another order than the others: "
                f"number {d.seq} is {_at(d.got)}."
            )
        case Kind.UNEVEN_ITERATIONS:
            verb = are(d.culprits, "is", "are")
            return f"{who} {verb} in another iteration than the others {on}, in {_at(d.got)}."
        case Kind.GROUP_CREATION_ORDER:
            return f"{who} called {_at(d.got)} as number {d.seq} {on}."
        case _:
            says = "" if d.mismatch is None else d.mismatch.found.get(d.got.rank, "")
            wanted = ""
            if d.mismatch is not None and says:
                wanted = f": {says} where {d.mismatch.expected} is expected"
            return f"{who} called {_at(d.got)} as number {d.seq} {on}{wanted}."
