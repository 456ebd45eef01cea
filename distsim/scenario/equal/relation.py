"""Relations between the tensors of several ranks and one whole tensor: equal, joined, summed, or none."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["How", "TensorRelation", "distance", "joined", "relation"]

Array = NDArray[Any]
PARTS = (2, 3)
"""Blocks into which a rank's shard may be cut before the shards are joined: the two halves of a gate or of a zigzag
sequence, and query, key and value of one weight."""


class How(enum.Enum):
    """Relation of the ranks' tensors to the whole tensor."""

    EQUAL = "equal"
    JOINED = "joined"
    SUM = "sum"
    MULTIPLE = "multiple"
    NONE = "none"


@dataclass(frozen=True)
class TensorRelation:
    """Relation of the ranks' tensors to the whole; *distance* is relative to the norm of the whole."""

    how: How
    distance: float
    detail: str = ""
    factor: float = 1.0
    """For MULTIPLE: the ranks' tensor divided by the whole one."""


def distance(whole: Array, other: Array) -> float:
    """Return |other - whole| / |whole|; infinite if a value is not a number or the shapes differ."""
    if whole.shape != other.shape:
        return float("inf")
    a, b = whole.astype(np.float64), other.astype(np.float64)
    apart = float(np.linalg.norm((b - a).reshape(-1)))
    norm = float(np.linalg.norm(a.reshape(-1)))
    if not np.isfinite(apart):
        return 0.0 if np.array_equal(a, b, equal_nan=True) else float("inf")
    return apart / norm if norm else (0.0 if not apart else float("inf"))


def relation(whole: Array, shards: Sequence[Array], threshold: float) -> TensorRelation:
    """Return the relation of *shards*, one per rank in order, to *whole*.

    MULTIPLE means that the ranks are equal, and larger or smaller than *whole* by a whole number. A relation whose
    distance exceeds *threshold* is NONE, with the smallest distance of all candidates.
    """
    distinct = _distinct(shards)
    nearest = float("inf")
    for parts in (distinct, shards):  # copies over an axis of the mesh, or parts that happen to be equal
        for how, detail, combined in _candidates(whole.shape, parts):
            if how is How.SUM and len(parts) > len(distinct):
                continue  # equal tensors that are too small are a multiple
            apart = distance(whole, combined)
            if apart <= threshold:
                return TensorRelation(how, apart, detail)
            nearest = min(nearest, apart)
        if len(shards) == len(distinct):
            break
    if len(distinct) == 1 or all(distance(distinct[0], shard) <= threshold for shard in distinct):
        factor = _factor(whole, distinct[0], threshold)
        if factor is not None:
            return TensorRelation(How.MULTIPLE, nearest, f"{factor:g} times", factor)
    return TensorRelation(How.NONE, nearest)


def joined(shapes: Sequence[tuple[int, ...]], whole: tuple[int, ...]) -> int | None:
    """The dimension along which tensors of *shapes* make one of shape *whole*; None where none or several do."""
    fits = [
        axis
        for axis in range(len(whole))
        if all(len(s) == len(whole) and s[:axis] + s[axis + 1 :] == whole[:axis] + whole[axis + 1 :] for s in shapes)
        and sum(shape[axis] for shape in shapes) == whole[axis]
    ]
    return fits[0] if len(fits) == 1 else None


def _distinct(shards: Sequence[Array]) -> list[Array]:
    """*shards* less copies of earlier ones; all of them where there are none."""
    kept: list[Array] = []
    for shard in shards:
        if not any(shard.shape == other.shape and np.array_equal(shard, other, equal_nan=True) for other in kept):
            kept.append(shard)
    return kept


def _candidates(shape: tuple[int, ...], shards: Sequence[Array]) -> Iterator[tuple[How, str, Array]]:
    """Yield the tensors of *shape* that *shards* may form, the simplest first."""
    if len(shards) == 1 or all(shard.shape == shape for shard in shards):
        # several copies of one tensor that differ by rounding
        farthest = max(shards, key=lambda shard: distance(shards[0], shard))
        yield How.EQUAL, "", farthest if farthest.shape == shape else shards[0]
    if len(shards) == 1:
        return
    yield from _one_axis(shape, shards)
    for width in range(2, len(shards) // 2 + 1):  # a mesh of two axes: one within blocks of ranks, one across them
        if len(shards) % width:
            continue
        blocks = [shards[at : at + width] for at in range(0, len(shards), width)]
        strides = [shards[at :: len(shards) // width] for at in range(len(shards) // width)]
        for groups in (blocks, strides):
            for how, detail, inner in _inner(groups):
                for other, more, combined in _one_axis(shape, inner):
                    added = How.SUM in (how, other)
                    yield How.SUM if added else How.JOINED, f"{detail}, {more}", combined


def _inner(groups: list[Sequence[Array]]) -> Iterator[tuple[How, str, list[Array]]]:
    """The groups of ranks, each made one tensor in one way."""
    for axis in range(groups[0][0].ndim):
        if all(_joinable(group, axis) for group in groups):
            yield How.JOINED, f"dim {axis}", [np.concatenate(group, axis) for group in groups]
    if all(len({shard.shape for shard in group}) == 1 for group in groups):
        yield How.SUM, "sum", [_sum(group) for group in groups]


def _one_axis(shape: tuple[int, ...], shards: Sequence[Array]) -> Iterator[tuple[How, str, Array]]:
    for axis in range(len(shape)):
        if not _joinable(shards, axis) or sum(shard.shape[axis] for shard in shards) != shape[axis]:
            continue
        yield How.JOINED, f"dim {axis}", np.concatenate(shards, axis)
        if any(shard.shape != shards[0].shape for shard in shards):
            continue
        size = shards[0].shape[axis]
        yield How.JOINED, f"dim {axis}, in turn", _in_turn(shards, axis)
        for parts in PARTS:
            if size % parts == 0:
                cut = [np.split(shard, parts, axis) for shard in shards]
                yield (
                    How.JOINED,
                    f"dim {axis}, {parts} blocks",
                    np.concatenate([block[part] for part in range(parts) for block in cut], axis),
                )
        if size % 2 == 0:
            halves = [np.split(shard, 2, axis) for shard in shards]
            zigzag = [first for first, _ in halves] + [second for _, second in reversed(halves)]
            yield How.JOINED, f"dim {axis}, zigzag", np.concatenate(zigzag, axis)
    if all(shard.shape == shape for shard in shards):
        total = _sum(shards)
        yield How.SUM, "", total
        yield How.SUM, "mean", total / len(shards)


def _joinable(shards: Sequence[Array], axis: int) -> bool:
    first = shards[0].shape
    return all(
        shard.ndim == len(first) and shard.shape[:axis] + shard.shape[axis + 1 :] == first[:axis] + first[axis + 1 :]
        for shard in shards
    )


def _in_turn(shards: Sequence[Array], axis: int) -> Array:
    """The elements of the ranks in turn, as a strided split gives them out."""
    stacked = np.stack(shards, axis + 1)
    shape = list(shards[0].shape)
    shape[axis] *= len(shards)
    return stacked.reshape(shape)


def _sum(shards: Sequence[Array]) -> Array:
    total: Array = np.sum([shard.astype(np.float64) for shard in shards], axis=0)
    return total


def _factor(whole: Array, shard: Array, threshold: float) -> float | None:
    """Return the factor by which *shard* is too large if it is a whole number from 2 or its inverse."""
    if whole.shape != shard.shape:
        return None
    a, b = whole.astype(np.float64).reshape(-1), shard.astype(np.float64).reshape(-1)
    norm = float(a @ a)
    ratio = float(a @ b) / norm if norm else 0.0
    for factor in (ratio, 1 / ratio if ratio else 0.0):
        if factor >= 1.5 and abs(factor - round(factor)) < 1e-3 * factor:
            exact = float(round(factor)) if factor is ratio else 1.0 / round(factor)
            return exact if distance(a, b / exact) <= threshold else None
    return None
