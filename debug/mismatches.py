"""Contradictions between the calls of one group, in words."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.debug.align import Divergence
from distsim.debug.case import Case
from distsim.debug.explain import are, call_text, group_text, place, ranks_text, shape_of_call
from distsim.debug.kinds import Kind
from distsim.debug.verdict import Diagnosis

__all__ = ["contradiction"]

_NEXT = {
    Kind.MISSING_RANK: "Make the call at {theirs} on every rank, or on none.",
    Kind.EXTRA_COLLECTIVE: "Make the call at {mine} on every rank, or on none.",
    Kind.WRONG_ORDER: "Make both calls in one order on every rank; beware of loops over sets and rank-dependent branches.",
    Kind.THREAD_RACE: "Issue a group's collectives from one thread, or give each thread its own group.",
    Kind.UNEVEN_ITERATIONS: "Give every rank the same number of iterations (drop_last, an even sampler) or use DDP's join().",
    Kind.GROUP_CREATION_ORDER: "Call new_group on every rank of the world, in one order, also where the rank is no member.",
    Kind.ROOT_MISMATCH: "Pass the same src / dst on every rank; it is a global rank, not a group rank.",
    Kind.SPLITS_MISMATCH: "What rank i sends to rank j must be what rank j expects from rank i: exchange the sizes first.",
}


def contradiction(case: Case, divergence: Divergence, victims: Sequence[int]) -> Diagnosis:
    """The diagnosis of the first number at which a group's members are not in the same call."""
    d = divergence
    mine, theirs = d.got, d.expected
    who, others = ranks_text(d.culprits), ranks_text(d.reference)
    on = f"on {group_text(d.lane.group)}"
    where_i_am = f"{shape_of_call(mine)} at {place(mine.site)}"
    where_they_are = f"{shape_of_call(theirs)} at {place(theirs.site)}"
    call = theirs
    match d.kind:
        case Kind.MISSING_RANK:
            first = f"{who} never called {call_text(theirs)} {on}, at {place(theirs.site)}: it is in {where_i_am}."
        case Kind.EXTRA_COLLECTIVE:
            call = mine
            first = f"{who} called {call_text(mine)} {on}, at {place(mine.site)}, which the others do not call there."
        case Kind.WRONG_ORDER:
            first = f"{who} called {where_i_am} as number {d.seq} {on}, before the call that the others make first."
        case Kind.THREAD_RACE:
            first = f"{who} issued calls {on} from several threads, in another order than the others: number {d.seq} is {where_i_am}."
        case Kind.UNEVEN_ITERATIONS:
            first = f"{who} is in another iteration of the loop than the others {on}: it is in {where_i_am}."
        case Kind.GROUP_CREATION_ORDER:
            first = f"{who} called {where_i_am} as number {d.seq} {on}."
        case _:
            aspect = (
                ""
                if d.mismatch is None
                else f": {d.mismatch.found.get(mine.rank, '')} where {d.mismatch.expected} is expected"
            )
            first = f"{who} called {where_i_am} as number {d.seq} {on}{aspect}."
    second = f"{others[0].upper()}{others[1:]} {are(d.reference, 'is', 'are')} in {where_they_are}."
    if d.tie:
        second = second[:-1] + "; as many here as there, so nothing but rank order says who is wrong."
    suggestion = _NEXT.get(d.kind, "Make the calls alike at {mine} and {theirs}.")
    met = d.lane.meetings.get(d.seq, {})
    sites = {rank: site for rank, record in met.items() if (site := record.site) is not None}
    return case.diagnosis(
        d.kind,
        d.culprits,
        victims,
        call=call,
        group=d.lane.group,
        explanation=f"{first[0].upper()}{first[1:]} {second}",
        suggestion=suggestion.format(mine=place(mine.site), theirs=place(theirs.site)),
        since_s=max(mine.issued_s, theirs.issued_s),
        sites=sites,
    )
