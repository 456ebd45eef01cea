"""What tensors of several ranks are of a whole one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distsim.planning.equal.compare import How, TensorRelation, distance, joined, relation

DRAW = np.random.default_rng(7)
WHOLE = DRAW.standard_normal((8, 12)).astype(np.float32)
A, B, C, D = np.split(WHOLE, 4, 0)
SUM = [DRAW.standard_normal(WHOLE.shape).astype(np.float32) for _ in range(2)]


def _halves(shards: list[Any]) -> list[Any]:
    """*shards* of a mesh: rows over one axis, columns over the other."""
    return [column for shard in shards for column in np.split(shard, 2, 1)]


@pytest.mark.parametrize(
    ("shards", "how", "detail"),
    [
        ([WHOLE], How.EQUAL, ""),
        ([WHOLE, WHOLE * (1 + 1e-7)], How.EQUAL, ""),
        ([A, B, C, D], How.JOINED, "dim 0"),
        ([A, A, B, B, C, C, D, D], How.JOINED, "dim 0"),
        (np.split(WHOLE, 3, 1), How.JOINED, "dim 1"),
        ([WHOLE[:3], WHOLE[3:]], How.JOINED, "dim 0"),
        ([WHOLE[::2], WHOLE[1::2]], How.JOINED, "dim 0, in turn"),
        ([np.concatenate([A, C]), np.concatenate([B, D])], How.JOINED, "dim 0, 2 blocks"),
        ([np.concatenate([A, D]), np.concatenate([B, C])], How.JOINED, "dim 0, zigzag"),
        (_halves(list(np.split(WHOLE, 2))), How.JOINED, "dim 1, dim 0"),
        ([WHOLE - SUM[0], SUM[0]], How.SUM, ""),
        ([WHOLE - SUM[0], WHOLE + SUM[0]], How.SUM, "mean"),
        ([WHOLE * 2, WHOLE * 2], How.MULTIPLE, "2 times"),
        ([WHOLE / 4] * 4, How.MULTIPLE, "0.25 times"),
        ([WHOLE, SUM[0]], How.NONE, ""),
        ([B, A, C, D], How.NONE, ""),
        ([WHOLE * 1.01], How.NONE, ""),
        ([A], How.NONE, ""),
        ([np.full_like(WHOLE, np.nan)], How.NONE, ""),
    ],
)
def test_what_the_ranks_tensors_make(shards: list[Any], how: How, detail: str) -> None:
    """The simplest way in which they make the whole one, if there is one."""
    found = relation(WHOLE, shards, 1e-5)
    assert (found.how, found.detail) == (how, detail)
    assert (found.distance <= 1e-5) is (how not in (How.NONE, How.MULTIPLE))


def test_values_that_are_no_numbers_are_equal_to_themselves_alone() -> None:
    """A nan in both layouts is no difference."""
    broken = np.array([1.0, np.nan])
    assert distance(broken, broken) == 0.0
    assert distance(broken, np.array([1.0, 2.0])) == float("inf")
    assert distance(np.zeros(2), np.zeros(2)) == 0.0
    assert distance(np.zeros(2), np.ones(2)) == float("inf")
    assert relation(np.zeros(2), [np.zeros(2)] * 2, 1e-5) == TensorRelation(How.EQUAL, 0.0)


def test_parts_that_happen_to_be_equal_are_joined() -> None:
    """The shards of a bias of zeros."""
    assert relation(np.zeros(4), [np.zeros(2)] * 2, 1e-5).how is How.JOINED


@pytest.mark.parametrize(
    ("shapes", "whole", "axis"),
    [
        ([(4, 6), (4, 6)], (8, 6), 0),
        ([(8, 2), (8, 4)], (8, 6), 1),
        ([(8, 6), (8, 6)], (8, 6), None),
        ([(4,)], (8, 6), None),
        ([(8, 6)], (8, 6), None),
    ],
)
def test_along_which_dimension_shapes_join(
    shapes: list[tuple[int, ...]], whole: tuple[int, ...], axis: int | None
) -> None:
    """Only where one dimension alone fits."""
    assert joined(shapes, whole) == axis
