"""Adds to diagnoses, for their JSON, what a printed report shows of the evidence: stacks, source lines, tracebacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distsim.debug.records import Evidence
from distsim.debug.records.call import line_of
from distsim.debug.records.diagnosis import Diagnosis, place_json
from distsim.debug.report.render import (
    last_calls,
    shown_tracebacks,
    stack_of,
    state_of_call,
    told_once,
)
from distsim.debug.report.stack_tree import merge_equal

LONGEST = 8
"""Number of calls of each rank that its history has."""
MOST_SIDES = 8
"""Largest number of different histories."""


def with_evidence(diagnoses: Sequence[Diagnosis], evidence: Evidence | None) -> list[Diagnosis]:
    """Return *diagnoses* whose JSON also has the stacks, source lines, tracebacks, histories and processes.

    Of diagnoses that differ only in the numbers of their exceptions, the first has the traceback.
    """
    if evidence is None:
        return list(diagnoses)
    with_traceback = {id(group[0]) for group in told_once(diagnoses, evidence)}
    return [replace(d, shown=_shown(d, evidence, id(d) in with_traceback)) for d in diagnoses]


def _shown(d: Diagnosis, evidence: Evidence, with_traceback: bool) -> dict[str, Any]:
    stacks = {rank: stack for rank in (*d.culprits, *d.victims) if (stack := stack_of(rank, evidence))}
    sites = [*d.sites.values(), *d.causes, *(site for stack in set(stacks.values()) for site in stack)]
    source = {str(site): line for site in sites if (line := line_of(evidence.sources, site))}
    states = {rank: evidence.ranks[rank] for rank in d.culprits if rank in evidence.ranks}
    facts = {
        "stacks": [
            {"ranks": list(ranks), "frames": [place_json(site, source) for site in reversed(stack)]}
            for ranks, stack in merge_equal(stacks)
        ],
        "tracebacks": [
            {"ranks": list(ranks), "text": text}
            for ranks, text in (shown_tracebacks(d, evidence) if with_traceback else ())
        ],
        "last_calls": {str(rank): text for rank, text in last_calls(d, evidence).items()},
        "history": [
            {"ranks": list(ranks), "calls": list(calls)}
            for ranks, calls in merge_equal(
                {
                    rank: tuple(state_of_call(call) for call in evidence.records.get(rank, ())[-LONGEST:])
                    for rank in (*d.culprits, *d.victims)
                }
            )[:MOST_SIDES]
        ],
        "processes": {
            str(rank): {"pid": state.pid, "host": state.host}
            for rank, state in states.items()
            if state.pid is not None and state.host is not None
        },
    }
    return {"source": source, **{name: value for name, value in facts.items() if value}}
