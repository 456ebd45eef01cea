"""Own work of ranks in steps with noise of many kinds: what accuses healthy ranks, and what hides slow ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
STEP_S = 0.5


def _episodes(ranks: int, steps: int, length: int, factor: float, among: int) -> Floats:
    """One rank after the other, of the first *among*, is slower for *length* steps."""
    factors = np.ones((ranks, steps))
    for number, begin in enumerate(range(0, steps, length)):
        factors[number % among, begin : begin + length] = factor
    return factors


def _each(ranks: int, steps: int, row: int, every: int, more: float) -> Floats:
    """Rank *row* works longer in each *every*-th step."""
    factors = np.ones((ranks, steps))
    factors[row, every - 1 :: every] += more
    return factors


def _remembered(draw: np.random.Generator, ranks: int, steps: int) -> Floats:
    noise = np.zeros((ranks, steps))
    for step in range(1, steps):
        noise[:, step] = 0.9 * noise[:, step - 1] + 0.02 * draw.standard_normal(ranks)
    return 1 + noise


def _refill(draw: np.random.Generator, ranks: int, steps: int) -> Floats:
    first = draw.integers(0, 7, ranks)
    return 1 + 0.4 * ((np.arange(steps) + first[:, None]) % 7 == 0)


def _experts(draw: np.random.Generator, ranks: int, steps: int) -> Floats:
    factors = np.ones((ranks, steps))
    for begin in range(0, steps, 3):
        factors[draw.integers(0, ranks), begin : begin + 3] = 1.25
    return factors


FAMILIES: dict[str, tuple[float, Callable[[np.random.Generator, int, int], Floats]]] = {
    # name -> independent noise of a step, factors of a step's work by rank and step
    "jitter of 2%": (0.02, lambda draw, r, k: np.ones((r, k))),
    "jitter of 10%": (0.10, lambda draw, r, k: np.ones((r, k))),
    "lognormal data of 20%": (0.0, lambda draw, r, k: np.exp(0.2 * draw.standard_normal((r, k)))),
    "imbalance that moves each 20 steps": (
        0.02, lambda draw, r, k: np.repeat(1 + 0.06 * draw.standard_normal((r, k // 20 + 1)), 20, axis=1)[:, :k]),
    "noise with a memory": (0.0, _remembered),
    "a slow episode that goes round": (0.02, lambda draw, r, k: _episodes(r, k, 25, 1.3, r)),
    "two ranks that swap": (0.02, lambda draw, r, k: _episodes(r, k, 30, 1.1, 2)),
    "a slow turn that goes round": (0.05, lambda draw, r, k: _episodes(r, k, 1, 1.5, r)),
    "checkpoints of rank 0": (0.03, lambda draw, r, k: _each(r, k, 0, 25, 8.0)),
    "an evaluation of rank 0": (0.03, lambda draw, r, k: _each(r, k, 0, 40, 16.0)),
    "rank 0 logs each tenth step": (0.03, lambda draw, r, k: _each(r, k, 0, 10, 0.5)),
    "pauses of all ranks": (0.03, lambda draw, r, k: 1 + 2.0 * (draw.random((r, k)) < 0.05)),
    "a slow start": (0.03, lambda draw, r, k: 1 + 2.0 * (np.arange(k) < 10) * (np.arange(r) == 1)[:, None]),
    "Pareto": (0.0, lambda draw, r, k: 1 + 0.05 * draw.pareto(2.5, (r, k))),
    "buckets of sequence lengths": (0.0, lambda draw, r, k: 1 + 0.1 * draw.integers(0, 4, (r, k))),
    "a loader that refills each seventh step": (0.03, _refill),
    "uneven experts": (0.03, _experts),
    "GPUs that differ by 1%": (0.02, lambda draw, r, k: np.repeat(1 + 0.01 * draw.standard_normal((r, 1)), k, axis=1)),
}  # fmt: skip


def own_work(name: str, seed: int, ranks: int = 4, steps: int = 200) -> Floats:
    """Return own work in seconds, shape (ranks, steps), of a healthy job."""
    draw = np.random.default_rng([seed, *name.encode()])
    jitter, factors = FAMILIES[name]
    return STEP_S * factors(draw, ranks, steps) * (1 + jitter * draw.standard_normal((ranks, steps)))
