"""Names the rank whose model differs from the others', by the exceptions of DDP's own check.

DDP compares the number of parameters and their sizes when a model is wrapped. Every rank that sees a difference
raises, also the ranks that are right: all of them where the numbers differ, all but rank 0 where rank 0's sizes are
the odd ones (torch/csrc/distributed/c10d/reducer.cpp, verify_params_across_processes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distsim.debug.diagnosis.context import Case
from distsim.debug.matching.agreement import majority
from distsim.debug.messages import are, capital, ranks_text, site_text
from distsim.debug.records import Phase
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind, Proof

COUNT = re.compile(r"DDP expects same model across all ranks, but Rank \d+ has (\d+) params, while rank \d+ has")
SIZES = re.compile(r"params\[(\d+)\] in this process with (sizes|strides) (\[[^\]]*\]) appears not to match")


def with_unlike_models(case: Case, diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Return *diagnoses* with one for all ranks that raised because their models differ."""
    for pattern, merged_diagnosis in ((COUNT, _by_count), (SIZES, _by_sizes)):
        raised = {
            rank: match.groups()
            for rank, state in case.index.states.items()
            if state.phase is Phase.RAISED and (match := pattern.search(state.exception or "")) is not None
        }
        own = [d for d in diagnoses if d.kind is Kind.RANK_RAISED and d.culprits and raised.keys() >= set(d.culprits)]
        merged = merged_diagnosis(case, raised, own) if own else None
        if merged is not None:
            first = diagnoses.index(own[0])
            return [*diagnoses[:first], merged, *(d for d in diagnoses[first:] if d not in own)]
    return list(diagnoses)


def _by_count(case: Case, raised: Mapping[int, tuple[str, ...]], own: Sequence[Diagnosis]) -> Diagnosis | None:
    """Return the diagnosis of the ranks that have another number of parameters than most."""
    numbers = {rank: raised[rank][0] for rank in sorted(raised)}
    vote = majority(numbers)
    odd = vote.culprits
    if not odd:
        return None  # the other ranks have not raised, or have left no exception
    tie = " The ranks are split evenly: the culprit is chosen by rank order." if vote.tie else ""
    sides = {count: [rank for rank in numbers if numbers[rank] == count] for count in numbers.values()}
    counts = "; ".join(f"{count} on {ranks_text(ranks)}" for count, ranks in sides.items())
    d = next((d for d in own if set(d.culprits) <= set(odd)), own[0])
    return replace(
        _merged(case, d, own, odd),
        explanation=f"The models that DDP wraps differ: the number of parameters with a gradient is {counts}, at "
        f"{site_text(case.site(odd[0]))}. Every rank raised.{tie}",
        suggestion=f"Build the same model on {ranks_text(odd)} as on {ranks_text(vote.reference)}: compare its "
        "layers and its frozen parameters (requires_grad).",
    )


def _by_sizes(case: Case, raised: Mapping[int, tuple[str, ...]], own: Sequence[Diagnosis]) -> Diagnosis | None:
    """Return the diagnosis of rank 0 if most ranks have equal parameters, and differ from rank 0."""
    if 0 in raised or 2 * len(raised) <= case.index.evidence.world_size or len(set(raised.values())) > 1:
        return None
    number, attribute, value = next(iter(raised.values()))
    ranks = sorted(raised)
    each = are(ranks, "", "each ")
    return replace(
        _merged(case, own[0], own, [0]),
        kind=Kind.SHAPE_MISMATCH,
        proof=Proof.MET,
        explanation=f"{capital(ranks_text(ranks))} {each}raised because their parameter {number} has the {attribute} "
        f"{value}, and rank 0's has others, at {site_text(case.site(ranks[0]))}. They agree with each other, so rank 0 "
        "has the odd model.",
        suggestion="Build the model of rank 0 as on the other ranks: compare what it is built from (configuration, "
        "vocabulary, checkpoint).",
    )


def _merged(case: Case, d: Diagnosis, own: Sequence[Diagnosis], odd: Sequence[int]) -> Diagnosis:
    """Return *d* about the *odd* ranks; the other ranks of *own* wait or raised because of them."""
    others = {rank for other in own for rank in (*other.culprits, *other.victims)} - set(odd)
    sites = {rank: site for other in own for rank, site in other.sites.items()}
    return replace(
        d,
        culprits=tuple(odd),
        victims=tuple(sorted(others)),
        sites={**case.sites(odd), **sites},
        stuck={rank: at for other in own for rank, at in other.stuck.items()},
    )
