"""Judgement of the facts of all ranks: run the checks, and reduce their sightings to one finding per cause.

The facts of a real job are in files that its ranks wrote on this host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distsim.debug.diagnosis.silent.checks import KINDS
from distsim.debug.diagnosis.silent.facts import (
    RankFacts,
    Severity,
    Sighting,
    SilentFinding,
    SilentKind,
    is_allowed,
)
from distsim.debug.diagnosis.silent.facts_file import SavedFacts, read_facts
from distsim.debug.diagnosis.silent.view import View, replica_sets
from distsim.debug.messages import ranks_text
from distsim.debug.rings.files import facts_path

CONSEQUENCES = {
    SilentKind.REPLICAS_DIVERGE: frozenset(
        {
            SilentKind.REPLICAS_DIFFER_AT_START,
            SilentKind.HYPERPARAMETER_DIFFERS,
            SilentKind.OPTIMIZER_STATE_DIFFERS,
            SilentKind.CHANGED_OUTSIDE_STEP,
            SilentKind.GRADIENT_REDUCE_OP,
            SilentKind.REPLICATE_IS_NOT,
            SilentKind.MODE_DIFFERS,
            SilentKind.DROPOUT_DIFFERS,
            SilentKind.CLIPPED_BY_LOCAL_NORM,
        }
    ),
    SilentKind.OPTIMIZER_STATE_DIFFERS: frozenset(
        {SilentKind.REPLICAS_DIFFER_AT_START, SilentKind.HYPERPARAMETER_DIFFERS, SilentKind.CHANGED_OUTSIDE_STEP}
    ),
    SilentKind.CHANGED_OUTSIDE_STEP: frozenset({SilentKind.REPLICAS_DIFFER_AT_START}),
    SilentKind.MIXED_SCALE: frozenset({SilentKind.REPLICAS_DIVERGE}),
    SilentKind.SAMPLES_OVERLAP: frozenset({SilentKind.SPLITS_DIFFER}),
    SilentKind.SAMPLES_UNSEEN: frozenset({SilentKind.SPLITS_DIFFER, SilentKind.SAMPLES_OVERLAP}),
    SilentKind.SAME_BATCH: frozenset({SilentKind.SAMPLES_OVERLAP}),
}
"""For each kind, the kinds that cause it. A consequence is not reported for ranks whose cause is reported."""
LEVELS = list(Severity)
SHOWN = 3
"""Largest number of tensors that a sentence names."""
MOST_JUDGED = 1_500_000
"""Largest number of parameters, summed over the steps of all ranks, that are checked. This many take 30 to 60 s."""


def judge(facts: Mapping[int, RankFacts], allowed: Sequence[str] = ()) -> list[SilentFinding]:
    """Return the findings of a run, errors first.

    Args:
        facts: Facts of each rank, by rank.
        allowed: Patterns `KIND:TENSOR` of findings that the user accepts.
    """
    view = View(facts)
    sets = replica_sets(view)
    sightings = [one for row in KINDS.values() for one in row.check(view, sets) if not is_allowed(one, allowed)]
    return _findings(_causes(sightings))


def _causes(sightings: Iterable[Sighting]) -> list[Sighting]:
    """Return the sightings without the consequences of others."""
    sightings = list(sightings)
    diverged = [one for one in sightings if one.kind is SilentKind.REPLICAS_DIVERGE]
    kept = []
    for one in sightings:
        causes = CONSEQUENCES.get(one.kind, frozenset())
        if any(other.kind in causes and _is_before(other, one) for other in sightings):
            continue
        if one.kind is SilentKind.OPTIMIZER_STATE_DIFFERS and any(
            other.step < one.step and _share(other, one) for other in diverged
        ):
            continue
        kept.append(one)
    return kept


def _is_before(cause: Sighting, one: Sighting) -> bool:
    if cause.kind is SilentKind.HYPERPARAMETER_DIFFERS and one.kind is SilentKind.OPTIMIZER_STATE_DIFFERS:
        return _share(cause, one) and cause.step <= one.step != 1  # the state before the first step was loaded
    return _share(cause, one) and cause.step <= one.step


def _share(one: Sighting, other: Sighting) -> bool:
    return not set(one.ranks).isdisjoint(other.ranks)


def _severity(one: Sighting) -> Severity:
    return one.level or KINDS[one.kind].level


def _findings(sightings: Sequence[Sighting]) -> list[SilentFinding]:
    """Merge sightings with equal reasons into one finding each, at the first step, sorted by severity and step."""
    alike: dict[tuple[SilentKind, Severity, str], list[Sighting]] = defaultdict(list)
    for one in sightings:
        alike[one.kind, _severity(one), one.reason].append(one)
    findings = [_finding(group) for group in alike.values()]
    return sorted(findings, key=lambda one: (LEVELS.index(one.level), one.step, list(SilentKind).index(one.kind)))


def _finding(sightings: Sequence[Sighting]) -> SilentFinding:
    first = min(sightings, key=lambda one: one.step)
    tensors = tuple(dict.fromkeys(one.tensor for one in sightings if one.tensor))
    ranks = tuple(sorted({rank for one in sightings for rank in one.ranks}))
    distances = [one.distance for one in sightings if one.distance is not None]
    names = ", ".join(tensors[:SHOWN]) + (f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else "")
    groups = list(dict.fromkeys(one.ranks for one in sightings))
    who = ranks_text(ranks) if len(groups) == 1 else " and ".join(ranks_text(group) for group in groups[:4])

    def fill(sentence: str) -> str:
        first_name = tensors[0] if tensors else "*"
        return sentence.replace("{first}", first_name).replace("{tensor}", names).replace("{ranks}", who)

    return SilentFinding(
        first.kind,
        _severity(first),
        ranks,
        tensors,
        first.step,
        first.site,
        fill(first.evidence),
        fill(first.reason),
        fill(first.suggestion or KINDS[first.kind].cure),
        max(distances, default=None),
    )


@dataclass
class SilentSearch:
    """Result of the search: findings, and notes on what was not checked."""

    findings: list[SilentFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """One line for each part of the job that was not checked, with the reason."""


def search(rings: Mapping[int, Path], world_size: int, allowed: Sequence[str] = ()) -> SilentSearch:
    """Check the facts of all ranks of a real job.

    Args:
        rings: Ring file of each rank on this host. The facts file of a rank is in the same folder.
        world_size: Number of ranks of the job.
        allowed: Patterns `KIND:TENSOR` of findings that the user accepts.
    """
    result = SilentSearch()
    if len(rings) < world_size:
        here = ranks_text(tuple(sorted(rings)))
        result.notes.append(f"silent faults: not searched, only {here} of {world_size} ran on this host")
        return result
    saved = _read(rings, result.notes)
    for rank, one in saved.items():
        result.notes += [f"silent faults: rank {rank} {note}" for note in one.notes]
    if any(one.saw_gpu for one in saved.values()):
        result.notes.append("silent faults: GPU tensors are not searched")
    facts = {rank: one.facts for rank, one in saved.items() if not one.facts.is_empty}
    for rank, of_rank in facts.items():
        of_rank.rank = rank
    if len(facts) > 1:
        result.findings = judge(facts, allowed)
    return result


def _read(rings: Mapping[int, Path], notes: list[str]) -> dict[int, SavedFacts]:
    saved = {}
    for rank, ring in sorted(rings.items()):
        path = facts_path(ring)
        if not path.exists():  # it made no step
            continue
        try:
            saved[rank] = read_facts(path, MOST_JUDGED / len(rings))
        except (OSError, ValueError) as error:
            notes.append(f"silent faults: not searched on rank {rank}: {error}")
    return saved
