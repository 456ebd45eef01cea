"""View of the facts of all ranks, step by step, and the ranks that should hold equal values.

A replica set is a parameter and the ranks that should hold it with equal values. Each set records its evidence; the
strongest evidence wins.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.debug.diagnosis.silent.facts import (
    CallCount,
    ParameterFact,
    RankFacts,
    StepFact,
    TrainingPhase,
    Vector,
    Window,
)

EQUAL = 1e-6
"""Relative difference up to which tensors count as equal. Sums in another order cause such differences."""


class ParameterKey(NamedTuple):
    """Identity of a parameter across ranks."""

    optimizer: int
    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def distance(one: Vector, other: Vector) -> float:
    """Return the distance of two tensors, estimated from their sketches."""
    return float(_norms(np.subtract(one, other, dtype=np.float64)))


def norm(vectors: Iterable[Vector]) -> float:
    """Return the largest norm of the tensors, estimated from their sketches; 0 without tensors."""
    rows = list(vectors)
    return float(_norms(np.array(rows, dtype=np.float64)).max()) if rows else 0.0


def differ(vectors: Mapping[int, Vector], tolerance: float = 0.0) -> bool:
    """Return whether ranks' tensors differ by more than *tolerance* and by more than rounding errors."""
    if len(vectors) < 2:
        return False
    rows = np.array(list(vectors.values()), dtype=np.float64)
    limit = max(tolerance, EQUAL * float(_norms(rows).max()))
    return bool((_norms(rows - rows[0]) > limit).any())


def clusters(vectors: Mapping[int, Vector], relative: float = EQUAL) -> list[tuple[int, ...]]:
    """Return groups of ranks whose tensors are equal, the largest group first."""
    left = sorted(vectors)
    if not left:
        return []
    rows = np.array([vectors[rank] for rank in left], dtype=np.float64)
    limit = relative * float(_norms(rows).max())
    groups = []
    while left:
        agrees = _norms(rows - rows[0]) <= limit
        agrees[0] = True
        groups.append(tuple(rank for rank, is_near in zip(left, agrees, strict=True) if is_near))
        left = [rank for rank, is_near in zip(left, agrees, strict=True) if not is_near]
        rows = rows[~agrees]
    return sorted(groups, key=lambda ranks: (-len(ranks), ranks))


def outvoted(vectors: Mapping[int, Vector], relative: float = EQUAL) -> tuple[int, ...]:
    """Return the ranks whose tensors differ from that of more than half of the ranks; empty if no half agrees."""
    most = next(iter(clusters(vectors, relative)), ())
    return tuple(rank for rank in sorted(vectors) if rank not in most) if 2 * len(most) > len(vectors) else ()


def _norms(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the norm of each row. `np.linalg.norm` takes three times as long on 16 numbers."""
    norms: NDArray[np.float64] = np.sqrt(np.einsum("...i,...i->...", rows, rows))
    return norms


class View:
    """Facts of all ranks, by parameter and by step."""

    def __init__(self, facts: Mapping[int, RankFacts]) -> None:
        self.facts = dict(sorted(facts.items()))
        self.parameters: dict[ParameterKey, dict[int, ParameterFact]] = defaultdict(dict)
        self.numbers: dict[int, dict[ParameterKey, int]] = {}
        """Index of each parameter in the list of its rank, by rank."""
        self.keys: dict[int, dict[int, ParameterKey]] = {}
        """Inverse of `numbers`: parameter by index, by rank."""
        self.steps: dict[tuple[int, int], dict[int, StepFact]] = defaultdict(dict)
        """Steps by (optimizer, step number), then by rank."""
        for rank, record in self.facts.items():
            self._add(rank, record)
        self.order = sorted(self.steps, key=lambda step: (step[1], step[0]))
        """Keys of `steps`, sorted by step number, then by optimizer."""

    def _add(self, rank: int, record: RankFacts) -> None:
        numbers: dict[ParameterKey, int] = {}
        keys: dict[int, ParameterKey] = {}
        has_joined = False  # from then on its n-th step is not that of the others
        for step in record.steps:
            has_joined |= step.window.joined
            if not has_joined:
                self.steps[step.optimizer, step.number][rank] = step
            for number in step.parameters:
                if number in keys:
                    continue
                fact = record.parameters[number]
                key, times = ParameterKey(step.optimizer, fact.name, fact.shape), 1
                while key in numbers:
                    times += 1
                    key = ParameterKey(step.optimizer, f"{fact.name} (number {times})", fact.shape)
                numbers[key], keys[number] = number, key
                self.parameters[key][rank] = fact
        self.numbers[rank], self.keys[rank] = numbers, keys

    def steps_of(self, optimizer: int, ranks: Sequence[int] = ()) -> Iterator[tuple[int, dict[int, StepFact]]]:
        """Yield the number and the facts by rank of each step of an optimizer that all of *ranks* made, in order."""
        for step in self.order:
            if step[0] == optimizer and all(rank in self.steps[step] for rank in ranks):
                yield step[1], self.steps[step]

    def vectors(
        self, role: str, steps: Mapping[int, StepFact], key: ParameterKey, ranks: Sequence[int]
    ) -> dict[int, Vector] | None:
        """Return the sketches of a parameter in one step, by rank.

        Args:
            role: Field of `StepFact`: `before`, `gradients` or `after`.
            steps: Facts of the step, by rank.
            key: The parameter.
            ranks: Ranks to include.

        Returns:
            None if one of *ranks* has no such sketch.
        """
        vectors: dict[int, Vector] = {}
        for rank in ranks:
            step = steps.get(rank)
            vector = None if step is None else getattr(step, role).get(self.numbers[rank].get(key, -1))
            if vector is None:
                return None
            vectors[rank] = vector
        return vectors

    def local(self, steps: Mapping[int, StepFact], key: ParameterKey, ranks: Sequence[int]) -> dict[int, Vector] | None:
        """Return the sum of each rank's local gradients over its micro-batches, or None if one of *ranks* has none."""
        sums: dict[int, Vector] = {}
        for rank in ranks:
            parts = steps[rank].local.get(self.numbers[rank].get(key, -1)) if rank in steps else None
            if not parts:
                return None
            sums[rank] = np.sum(np.array(parts, dtype=np.float64), axis=0)
        return sums

    def windows(self, rank: int) -> Iterator[Window]:
        """Yield the events of a rank before each step, and after the last one."""
        record = self.facts[rank]
        for step in record.steps:
            yield step.window
        yield record.rest

    def events(self) -> Iterator[tuple[int, int, Window]]:
        """Yield rank, number and content of each window of each rank."""
        for rank in self.facts:
            for number, window in enumerate(self.windows(rank)):
                yield rank, number, window


class SilentEvidence(enum.IntEnum):
    """Reason why ranks should hold equal values. A smaller number is stronger evidence."""

    DDP = 1
    MESH = 2
    REDUCED = 3
    EQUALIZED = 4
    ACTIVATIONS = 5
    BULK = 6

    @property
    def is_proof(self) -> bool:
        """Return whether a divergence is reported as an error; otherwise it is a warning."""
        return self <= SilentEvidence.REDUCED

    @property
    def is_guess(self) -> bool:
        """Return whether the evidence is only likely. Findings that depend on it are warnings."""
        return self > SilentEvidence.EQUALIZED

    @property
    def sentence(self) -> str:
        """Return the sentence for a finding, with the fields `{tensor}` and `{ranks}`."""
        return _SENTENCES[self]


_SENTENCES = {
    SilentEvidence.DDP: "DistributedDataParallel keeps {tensor} equal on {ranks}.",
    SilentEvidence.MESH: "The placements of {tensor} say that {ranks} hold the same values.",
    SilentEvidence.REDUCED: "The gradient of {tensor} is all-reduced over {ranks}.",
    SilentEvidence.ACTIVATIONS: "{ranks} exchange activations in forward or backward, and {tensor} was equal on them "
    "at the start.",
    SilentEvidence.BULK: "Most gradients of the step are reduced over {ranks}, and {tensor} was equal on them at "
    "the start.",
    SilentEvidence.EQUALIZED: "The gradients of {tensor} on {ranks} are made equal before the step.",
}


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """A parameter, and the ranks that should hold it with equal values."""

    key: ParameterKey
    ranks: tuple[int, ...]
    evidence: SilentEvidence


Source = Callable[[View], Iterator[ReplicaSet]]


def replica_sets(view: View) -> dict[ParameterKey, list[ReplicaSet]]:
    """Return the replica sets of each parameter.

    A set whose ranks are part of a set with equal or stronger evidence is left out, and so are parameters that the
    program marked with `varies`.
    """
    strongest: dict[tuple[ParameterKey, tuple[int, ...]], ReplicaSet] = {}
    for source in SOURCES:
        for one in source(view):
            if len(one.ranks) > 1 and not any(fact.varies for fact in view.parameters[one.key].values()):
                strongest.setdefault((one.key, one.ranks), one)
    sets: dict[ParameterKey, list[ReplicaSet]] = defaultdict(list)
    for one in sorted(strongest.values(), key=lambda one: one.evidence):
        if not any(set(one.ranks) <= set(other.ranks) for other in sets[one.key]):
            sets[one.key].append(one)
    return sets


def _declared(view: View, attribute: str, evidence: SilentEvidence) -> Iterator[ReplicaSet]:
    for key, facts in view.parameters.items():
        for ranks in sorted({getattr(fact, attribute) for fact in facts.values()} - {()}):
            here = tuple(rank for rank in ranks if rank in facts and getattr(facts[rank], attribute) == ranks)
            yield ReplicaSet(key, here, evidence)


def of_ddp(view: View) -> Iterator[ReplicaSet]:
    """Yield the parameters of each DistributedDataParallel model."""
    return _declared(view, "ddp", SilentEvidence.DDP)


def of_mesh(view: View) -> Iterator[ReplicaSet]:
    """Yield the DTensors that are replicated over a dimension of their mesh."""
    return _declared(view, "mesh", SilentEvidence.MESH)


def of_reduced_gradients(view: View) -> Iterator[ReplicaSet]:
    """Yield parameters whose own `.grad` was all-reduced between backward and step."""
    for rank, call in _calls(view):
        for number in call.gradients if call.op in ("all_reduce", "all_reduce_coalesced", "reduce") else ():
            key = view.keys[rank].get(number)
            here = () if key is None else tuple(r for r in sorted(call.ranks) if r in view.parameters[key])
            if key is not None and call.op != "reduce":
                yield ReplicaSet(key, here, SilentEvidence.REDUCED)
            elif key is not None and _began_equal(view, key, here):  # the root may send the values later
                yield ReplicaSet(key, here, SilentEvidence.BULK)


UNLIKE = 1e-3
"""Relative difference above which local gradients count as different."""
MADE_EQUAL = 1e-5
"""Relative difference up to which reduced gradients count as equal."""


MOST_COMPARED = 3
"""Number of steps in which the gradients of a parameter are compared: the first steps, in which all tensors are
sketched.
"""


def of_equalized_gradients(view: View) -> Iterator[ReplicaSet]:
    """Yield parameters whose local gradients differ and whose final gradients are equal, whichever calls reduced
    them.
    """
    for key, facts in view.parameters.items():
        ranks, compared = sorted(facts), 0
        for _, steps in view.steps_of(key.optimizer):
            numbers = {rank: view.numbers[rank].get(key, -1) for rank in ranks if rank in steps}
            final = {rank: steps[rank].gradients[n] for rank, n in numbers.items() if n in steps[rank].gradients}
            if len(final) > 1 and norm(final.values()) > 0.0:
                compared += 1
                yield from _equalized(view, key, steps, final)
            if compared == MOST_COMPARED:
                break


def _equalized(
    view: View, key: ParameterKey, steps: dict[int, StepFact], vectors: dict[int, Vector]
) -> Iterator[ReplicaSet]:
    for group in clusters(vectors, MADE_EQUAL):
        local = view.local(steps, key, group) if len(group) > 1 else None
        is_zero = not norm([vectors[rank] for rank in group])
        if local is not None and not is_zero and differ(local, UNLIKE * norm(local.values())):
            yield ReplicaSet(key, group, SilentEvidence.EQUALIZED)


def of_activations(view: View) -> Iterator[ReplicaSet]:
    """Yield parameters that were equal at the start on ranks that exchange activations (tensor or sequence
    parallelism).
    """
    groups = activation_groups(view)
    experts = _ranks_of_experts(view)
    for key, facts in view.parameters.items():
        for group in groups:
            ranks = tuple(rank for rank in group if rank in facts)
            if len(ranks) > 1 and experts.isdisjoint(ranks) and _began_equal(view, key, ranks):
                yield ReplicaSet(key, ranks, SilentEvidence.ACTIVATIONS)


SYMMETRIC = frozenset(
    {
        *("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_coalesced"),
        *("all_gather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_tensor"),
        "reduce_scatter_tensor_coalesced",
    }
)
"""Operations in which all ranks have the same role (no root)."""


def activation_groups(view: View) -> list[tuple[int, ...]]:
    """Return groups of ranks, other than those of DDP, that exchange activations in forward or backward."""
    data_parallel = {fact.ddp for facts in view.parameters.values() for fact in facts.values()}
    groups = {
        tuple(sorted(call.ranks))
        for _, call in _calls(view)
        if call.pass_ in (TrainingPhase.FORWARD, TrainingPhase.BACKWARD) and call.op in SYMMETRIC and not call.by_torch
    }
    return sorted(group for group in groups if len(group) > 1 and group not in data_parallel)


def _calls(view: View) -> Iterator[tuple[int, CallCount]]:
    for rank, _, window in view.events():
        for call in window.calls:
            yield rank, call


def _ranks_of_experts(view: View) -> set[int]:
    """Return ranks that exchange tokens by all_to_all, whose unreduced parameters may be experts."""
    ranks: set[int] = set()
    for _, call in _calls(view):
        if call.op.startswith("all_to_all") and call.pass_ in (TrainingPhase.FORWARD, TrainingPhase.BACKWARD):
            ranks.update(call.ranks)
    return ranks


def _began_equal(view: View, key: ParameterKey, ranks: tuple[int, ...]) -> bool:
    """Return whether a parameter was equal on *ranks* before the first step, and not by chance.

    A constant parameter (zeros or ones) counts only if all parameters of its module were equal; otherwise it may be
    the bias of a sharded weight.
    """
    facts, steps = view.parameters[key], view.steps.get((key.optimizer, 1), {})
    if len(ranks) < 2 or any(facts[rank].mesh for rank in ranks) or not _is_equal(view, key, ranks, steps):
        return False
    if not any(facts[rank].constant for rank in ranks):
        return True
    module = facts[ranks[0]].module
    siblings = {
        other
        for rank in ranks
        for other, number in view.numbers[rank].items()
        if view.facts[rank].parameters[number].module == module and other.optimizer == key.optimizer
    }
    return all(_is_equal(view, other, ranks, steps) for other in siblings)


def _is_equal(view: View, key: ParameterKey, ranks: tuple[int, ...], steps: dict[int, StepFact]) -> bool:
    before = view.vectors("before", steps, key, ranks)
    return before is not None and not differ(before)


def of_bulk_reductions(view: View) -> Iterator[ReplicaSet]:
    """Yield parameters that were equal at the start on ranks that reduce most of the gradients between backward and
    step.
    """
    experts = _ranks_of_experts(view)
    for optimizer in sorted({key.optimizer for key in view.parameters}):
        keys = [key for key in view.parameters if key.optimizer == optimizer]
        for group, (elements, of_gradients) in _reduced_elements(view, optimizer).items():
            holders = {key: tuple(rank for rank in group if rank in view.parameters[key]) for key in keys}
            equal = [key for key in keys if _began_equal(view, key, holders[key])]
            same = sum(key.numel for key in equal)
            others = sum(key.numel for key in keys) - same
            if experts.isdisjoint(group):
                is_bulk = 2 * elements >= same + others
            else:  # those that began unlike are the experts, if they are the larger part
                is_bulk = 2 * of_gradients >= same and others >= same - of_gradients
            for key in equal if is_bulk else ():
                yield ReplicaSet(key, holders[key], SilentEvidence.BULK)


def _reduced_elements(view: View, optimizer: int) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return, for each group, the largest number of elements reduced between backward and step in any step.

    The first number counts all calls, the second only calls that reduce a `.grad` of this optimizer.
    """
    most: dict[tuple[int, ...], tuple[int, int]] = {}
    for _, steps in view.steps_of(optimizer):
        for rank, step in steps.items():
            parameters, in_optimizer = view.facts[rank].parameters, set(step.parameters)
            reduced: dict[tuple[int, ...], tuple[int, int]] = {}
            for call in step.window.calls:
                if call.pass_ is TrainingPhase.REDUCTION and call.op in SYMMETRIC and not call.values:
                    total, own = reduced.get(group := tuple(sorted(call.ranks)), (0, 0))
                    elements = sum(parameters[number].numel for number in call.gradients) or call.largest
                    of_call = sum(parameters[number].numel for number in call.gradients & in_optimizer)
                    reduced[group] = total + elements, own + of_call
            for group, counts in reduced.items():
                most[group] = max(most.get(group, (0, 0)), counts)
    return dict(sorted(most.items()))


SOURCES: tuple[Source, ...] = (
    of_ddp,
    of_mesh,
    of_reduced_gradients,
    of_equalized_gradients,
    of_activations,
    of_bulk_reductions,
)
