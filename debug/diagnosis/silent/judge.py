"""From the facts of all ranks to findings: runs the checks, and keeps one finding a cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from distsim.debug.diagnosis.silent.allowed import is_allowed
from distsim.debug.diagnosis.silent.checks import CHECKS
from distsim.debug.diagnosis.silent.facts import RankFacts
from distsim.debug.diagnosis.silent.finding import Level, Sighting, SilentFinding, SilentKind
from distsim.debug.diagnosis.silent.replicas import replica_sets
from distsim.debug.diagnosis.silent.view import View
from distsim.debug.messages.phrases import ranks_text

__all__ = ["judge"]

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
}
"""What follows from what: not reported of ranks of which its cause is."""
LEVELS = list(Level)
SHOWN = 3
"""Tensors that a sentence names."""


def judge(facts: Mapping[int, RankFacts], allowed: Sequence[str] = ()) -> list[SilentFinding]:
    """The findings of a run, errors first.

    Args:
        facts: what each rank has recorded, by rank.
        allowed: patterns `kind:tensor` of what the user knows to be right.
    """
    view = View(facts)
    sets = replica_sets(view)
    sightings = [one for check in CHECKS.values() for one in check(view, sets) if not is_allowed(one, allowed)]
    return _findings(_causes(sightings))


def _causes(sightings: Iterable[Sighting]) -> list[Sighting]:
    """Those that do not follow from another: of one kind the first step, of a consequence none."""
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
    return _share(cause, one) and cause.step <= one.step


def _share(one: Sighting, other: Sighting) -> bool:
    return not set(one.ranks).isdisjoint(other.ranks)


def _findings(sightings: Sequence[Sighting]) -> list[SilentFinding]:
    """Sightings with one reason are one finding, at its first step."""
    alike: dict[tuple[SilentKind, Level, str], list[Sighting]] = defaultdict(list)
    for one in sightings:
        alike[one.kind, one.level, one.reason].append(one)
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
        first.level,
        ranks,
        tensors,
        first.step,
        first.site,
        fill(first.evidence),
        fill(first.reason),
        fill(first.suggestion),
        max(distances, default=None),
    )
