"""The facts of all ranks side by side: which parameter of one rank is which of another, and step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.debug.diagnosis.silent.facts import ParameterFact, RankFacts, StepFact, Vector, Window

__all__ = ["EQUAL", "Key", "View", "clusters", "differ", "distance", "norm"]

EQUAL = 1e-6
"""Part of the norm by which equal tensors may differ: additions in another order."""


class Key(NamedTuple):
    """Names one parameter on all ranks that have it."""

    optimizer: int
    name: str
    shape: tuple[int, ...]


def distance(one: Vector, other: Vector) -> float:
    """The distance of two tensors, from their sketches."""
    return float(_norms(np.subtract(one, other, dtype=np.float64)))


def norm(vectors: Iterable[Vector]) -> float:
    """The largest norm of some tensors."""
    rows = list(vectors)
    return float(_norms(np.array(rows, dtype=np.float64)).max()) if rows else 0.0


def differ(vectors: Mapping[int, Vector], tolerance: float = 0.0) -> bool:
    """Whether the tensors of some ranks differ by more than *tolerance*, and by more than a rounding."""
    if len(vectors) < 2:
        return False
    rows = np.array(list(vectors.values()), dtype=np.float64)
    limit = max(tolerance, EQUAL * float(_norms(rows).max()))
    return bool((_norms(rows - rows[0]) > limit).any())


def clusters(vectors: Mapping[int, Vector], relative: float = EQUAL) -> list[tuple[int, ...]]:
    """The ranks in groups that agree, the largest first."""
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


def _norms(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The norm of each row. `np.linalg.norm` takes three times as long on 16 numbers."""
    norms: NDArray[np.float64] = np.sqrt(np.einsum("...i,...i->...", rows, rows))
    return norms


class View:
    """Facts of all ranks, by parameter and by step."""

    def __init__(self, facts: Mapping[int, RankFacts]) -> None:
        self.facts = dict(sorted(facts.items()))
        self.parameters: dict[Key, dict[int, ParameterFact]] = defaultdict(dict)
        self.numbers: dict[int, dict[Key, int]] = {}
        """Of each rank: the place of a parameter in its own list."""
        self.keys: dict[int, dict[int, Key]] = {}
        """The inverse."""
        self.steps: dict[tuple[int, int], dict[int, StepFact]] = defaultdict(dict)
        """By optimizer and number of the step, then by rank."""
        for rank, record in self.facts.items():
            self._add(rank, record)
        self.order = sorted(self.steps, key=lambda step: (step[1], step[0]))
        """The steps, the first of each optimizer first."""

    def _add(self, rank: int, record: RankFacts) -> None:
        numbers: dict[Key, int] = {}
        keys: dict[int, Key] = {}
        for step in record.steps:
            self.steps[step.optimizer, step.number][rank] = step
            for number in step.parameters:
                if number in keys:
                    continue
                fact = record.parameters[number]
                key, times = Key(step.optimizer, fact.name, fact.shape), 1
                while key in numbers:
                    times += 1
                    key = Key(step.optimizer, f"{fact.name} (number {times})", fact.shape)
                numbers[key], keys[number] = number, key
                self.parameters[key][rank] = fact
        self.numbers[rank], self.keys[rank] = numbers, keys

    def steps_of(self, optimizer: int) -> Iterator[tuple[int, dict[int, StepFact]]]:
        """Number and facts of each step of an optimizer, in order."""
        for step in self.order:
            if step[0] == optimizer:
                yield step[1], self.steps[step]

    def vectors(
        self, role: str, steps: Mapping[int, StepFact], key: Key, ranks: Sequence[int]
    ) -> dict[int, Vector] | None:
        """The sketches of a parameter in one step (*role*: before, gradients, after) on *ranks*; None where one of
        them has none."""
        vectors: dict[int, Vector] = {}
        for rank in ranks:
            step = steps.get(rank)
            vector = None if step is None else getattr(step, role).get(self.numbers[rank].get(key, -1))
            if vector is None:
                return None
            vectors[rank] = vector
        return vectors

    def local(self, steps: Mapping[int, StepFact], key: Key, ranks: Sequence[int]) -> dict[int, Vector] | None:
        """The sums of the local gradients of all micro-batches on *ranks*; None where one of them has none."""
        sums: dict[int, Vector] = {}
        for rank in ranks:
            parts = steps[rank].local.get(self.numbers[rank].get(key, -1)) if rank in steps else None
            if not parts:
                return None
            sums[rank] = np.sum(np.array(parts, dtype=np.float64), axis=0)
        return sums

    def windows(self, rank: int) -> Iterator[Window]:
        """What a rank did between its steps, in order."""
        record = self.facts[rank]
        for step in record.steps:
            yield step.window
        yield record.rest
