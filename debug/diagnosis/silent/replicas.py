"""Which ranks hold one and the same parameter, and what says so: the evidence, the strongest first."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from distsim.debug.diagnosis.silent.facts import StepFact
from distsim.debug.diagnosis.silent.view import Key, View, clusters, differ, norm

__all__ = ["Evidence", "ReplicaSet", "replica_sets"]


class Evidence(enum.IntEnum):
    """Why ranks should hold one value; a smaller number is stronger."""

    DDP = 1
    MESH = 2
    REDUCED = 3
    EQUALIZED = 4

    @property
    def is_proof(self) -> bool:
        """Whether a divergence is an error, and not a warning."""
        return self <= Evidence.REDUCED

    @property
    def is_guess(self) -> bool:
        """Whether it is only likely: no finding but a warning rests on it."""
        return self > Evidence.EQUALIZED

    @property
    def sentence(self) -> str:
        """What was seen, with `{tensor}` and `{ranks}`."""
        return _SENTENCES[self]


_SENTENCES = {
    Evidence.DDP: "DistributedDataParallel keeps {tensor} equal on {ranks}.",
    Evidence.MESH: "The placements of {tensor} say that {ranks} hold the same values.",
    Evidence.REDUCED: "The gradient of {tensor} is all-reduced over {ranks}.",
    Evidence.EQUALIZED: "The gradients of {tensor} on {ranks} are made equal before the step.",
}


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """Ranks that hold one value of a parameter."""

    key: Key
    ranks: tuple[int, ...]
    evidence: Evidence


Source = Callable[[View], Iterator[ReplicaSet]]


def replica_sets(view: View) -> dict[Key, list[ReplicaSet]]:
    """All replica sets by parameter; of equal ranks that of the strongest evidence alone."""
    strongest: dict[tuple[Key, tuple[int, ...]], ReplicaSet] = {}
    for source in SOURCES:
        for one in source(view):
            if len(one.ranks) > 1 and not any(fact.varies for fact in view.parameters[one.key].values()):
                strongest.setdefault((one.key, one.ranks), one)
    sets: dict[Key, list[ReplicaSet]] = defaultdict(list)
    for one in sorted(strongest.values(), key=lambda one: one.evidence):
        if not any(set(one.ranks) <= set(other.ranks) for other in sets[one.key]):
            sets[one.key].append(one)
    return sets


def _declared(view: View, attribute: str, evidence: Evidence) -> Iterator[ReplicaSet]:
    for key, facts in view.parameters.items():
        for ranks in sorted({getattr(fact, attribute) for fact in facts.values()} - {()}):
            here = tuple(rank for rank in ranks if rank in facts and getattr(facts[rank], attribute) == ranks)
            yield ReplicaSet(key, here, evidence)


def of_ddp(view: View) -> Iterator[ReplicaSet]:
    """DistributedDataParallel was given the parameter."""
    return _declared(view, "ddp", Evidence.DDP)


def of_mesh(view: View) -> Iterator[ReplicaSet]:
    """A DTensor is replicated over a dimension of its mesh."""
    return _declared(view, "mesh", Evidence.MESH)


def of_reduced_gradients(view: View) -> Iterator[ReplicaSet]:
    """The parameter's own `.grad` was all-reduced between backward and step."""
    for rank in view.facts:
        for window in view.windows(rank):
            for call in window.calls:
                if call.op not in ("all_reduce", "all_reduce_coalesced"):
                    continue
                for number in call.gradients:
                    key = view.keys[rank].get(number)
                    if key is not None:
                        here = tuple(r for r in sorted(call.ranks) if r in view.parameters[key])
                        yield ReplicaSet(key, here, Evidence.REDUCED)


UNLIKE = 1e-3
"""Part of the norm from which local gradients count as different."""
MADE_EQUAL = 1e-5
"""Part of the norm by which gradients that were reduced may differ."""


def of_equalized_gradients(view: View) -> Iterator[ReplicaSet]:
    """Local gradients differ and those that the optimizer finds are equal, whatever route they took."""
    for key, facts in view.parameters.items():
        ranks = sorted(facts)
        for _, steps in view.steps_of(key.optimizer):
            yield from _equalized(view, key, ranks, steps)


def _equalized(view: View, key: Key, ranks: list[int], steps: dict[int, StepFact]) -> Iterator[ReplicaSet]:
    here = [rank for rank in ranks if rank in steps]
    final = {rank: v for rank in here if (v := view.vectors("gradients", steps, key, [rank])) is not None}
    vectors = {rank: vector for rank, one in final.items() for vector in one.values()}
    if norm(vectors.values()) == 0.0:
        return
    for group in clusters(vectors, MADE_EQUAL):
        local = view.local(steps, key, group) if len(group) > 1 else None
        is_zero = not norm([vectors[rank] for rank in group])
        if local is not None and not is_zero and differ(local, UNLIKE * norm(local.values())):
            yield ReplicaSet(key, group, Evidence.EQUALIZED)


SOURCES: tuple[Source, ...] = (of_ddp, of_mesh, of_reduced_gradients, of_equalized_gradients)
