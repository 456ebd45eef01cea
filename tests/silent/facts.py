"""Hand-made facts: a run of some ranks with one parameter, in a line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from distsim.debug.diagnosis.silent.facts import ParameterFact, RankFacts, StepFact, Vector

__all__ = ["run_of", "vector"]


def vector(value: float) -> Vector:
    """The sketch of a tensor of one number."""
    return np.array([value, *[0.0] * 15], dtype=np.float32)


def run_of(
    values: Mapping[int, Sequence[float]],
    gradients: Mapping[int, Sequence[float]] | None = None,
    change: Callable[[int, ParameterFact, list[StepFact]], None] | None = None,
    name: str = "w",
) -> dict[int, RankFacts]:
    """The facts of ranks whose parameter has *values*: before the first step, after it, before the second, after it,
    and so on. *gradients*: what the optimizer finds in each step. *change* edits what a rank has recorded."""
    facts = {}
    for rank, numbers in values.items():
        parameter = ParameterFact(name, (16,))
        steps = []
        for number in range(len(numbers) // 2):
            step = StepFact(0, number + 1, (0,), hyperparameters={0: (("lr", 0.1),)})
            step.before[0], step.after[0] = vector(numbers[2 * number]), vector(numbers[2 * number + 1])
            if gradients is not None:
                step.gradients[0] = vector(gradients[rank][number])
            step.state[0] = {}
            steps.append(step)
        if change is not None:
            change(rank, parameter, steps)
        facts[rank] = RankFacts(rank, [parameter], steps)
    return facts
