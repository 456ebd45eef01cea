"""Do the calls of one meeting agree: aspect by aspect, operation by operation."""

from __future__ import annotations

from typing import Any

import pytest

from distsim.debug.matching.agreement import Mismatch, check_meeting, check_pair
from distsim.debug.records import CallRecord, Group, Site
from distsim.debug.records.kinds import Kind

N = 4
WORLD = Group("0", "default_pg", tuple(range(N)))


def call(rank: int, op: str, **kw: Any) -> CallRecord:
    kw.setdefault("dtypes", ("float32",))
    return CallRecord(rank, kw.pop("group", WORLD), 7, op, site=Site("train.py", 10, "main"), **kw)


def shapes(*sizes: int) -> tuple[tuple[int, ...], ...]:
    return tuple((n,) for n in sizes)


def meeting(op: str, odd: int = 2, size: int = N, common: dict[str, Any] | None = None, **kw: Any) -> Mismatch | None:
    """All ranks bring *common*, rank *odd* brings *kw* on top."""
    base = {"input_shapes": shapes(4), **(common or {})}
    return check_meeting([call(r, op, **{**base, **(kw if r == odd else {})}) for r in range(size)])


@pytest.mark.parametrize(
    ("op", "common", "odd", "kind"),
    [
        ("all_reduce", {"reduce_op": "SUM"}, {"reduce_op": "MAX"}, Kind.REDUCE_OP_MISMATCH),
        ("all_reduce", {}, {"input_shapes": ((2, 2),)}, Kind.SHAPE_MISMATCH),
        ("all_reduce", {}, {"dtypes": ("float16",)}, Kind.DTYPE_MISMATCH),
        (
            "all_reduce_coalesced",
            {"input_shapes": shapes(1, 2)},
            {"input_shapes": shapes(1, 3)},
            Kind.SHAPE_MISMATCH,
        ),
        ("broadcast", {"root": 0}, {"root": 1}, Kind.ROOT_MISMATCH),
        ("broadcast", {"root": 0}, {"input_shapes": shapes(5)}, Kind.SHAPE_MISMATCH),
        ("reduce", {"root": 0, "reduce_op": "SUM"}, {"reduce_op": "AVG"}, Kind.REDUCE_OP_MISMATCH),
        ("all_gather_into_tensor", {}, {"input_shapes": shapes(3)}, Kind.SHAPE_MISMATCH),
        (
            "all_gather",
            {"output_shapes": shapes(4, 4, 4, 4)},
            {"output_shapes": shapes(4, 9, 4, 4)},
            Kind.SHAPE_MISMATCH,
        ),
        (
            "all_gather",
            {"output_shapes": shapes(4, 4, 4, 4)},
            {"input_shapes": shapes(5)},
            Kind.SHAPE_MISMATCH,
        ),
        ("gather", {"root": 2}, {"output_shapes": shapes(4, 4, 9, 4)}, Kind.SHAPE_MISMATCH),
        ("reduce_scatter_tensor", {"reduce_op": "SUM"}, {"input_shapes": shapes(8)}, Kind.SHAPE_MISMATCH),
        (
            "reduce_scatter",
            {"input_shapes": shapes(4, 4, 4, 4), "output_shapes": shapes(4), "reduce_op": "SUM"},
            {"output_shapes": shapes(6)},
            Kind.SHAPE_MISMATCH,
        ),
        (
            "all_to_all",
            {"input_shapes": shapes(4, 4, 4, 4), "output_shapes": shapes(4, 4, 4, 4)},
            {"input_shapes": shapes(5, 4, 4, 5)},
            Kind.SHAPE_MISMATCH,
        ),
        ("new_group", {"new_ranks": (0, 1)}, {"new_ranks": (2, 3)}, Kind.GROUP_CREATION_ORDER),
    ],
)
def test_odd_rank_is_named(op: str, common: dict[str, Any], odd: dict[str, Any], kind: Kind) -> None:
    """The rank that brings something else is the culprit, for what it differs in."""
    found = meeting(op, common=common, **odd)
    assert found is not None
    assert (found.kind, found.culprits) == (kind, (2,))
    assert not found.tie
    assert found.reference == (0, 1, 3)
    assert "rank 2" in str(found)
    assert "call #7" in str(found)


@pytest.mark.parametrize(
    ("op", "common", "odd"),
    [
        ("barrier", {"input_shapes": (), "dtypes": ()}, {}),
        ("all_reduce", {"input_shapes": ((4, 1),)}, {"input_shapes": ((4,),)}),
        ("broadcast", {"root": 0, "input_shapes": ((2, 2),)}, {"input_shapes": ((4,),)}),
        ("all_gather", {"output_shapes": shapes(4, 4, 9, 4)}, {"input_shapes": shapes(9)}),
        ("gather", {"root": 2}, {"output_shapes": shapes(4, 4, 4, 4)}),
        (
            "scatter",
            {"root": 2, "input_shapes": (), "output_shapes": shapes(4)},
            {"input_shapes": shapes(4, 4, 4, 4)},
        ),
        ("all_reduce", {}, {"is_async": True, "thread": "other"}),
    ],
)
def test_legal_differences_are_none(op: str, common: dict[str, Any], odd: dict[str, Any]) -> None:
    """What torch allows to differ is no mismatch."""
    assert meeting(op, common=common, **odd) is None


def test_scatter_list_of_the_root() -> None:
    """A root that hands out wrong sizes to everybody is the culprit, not the three receivers."""
    common = {"root": 0, "input_shapes": (), "output_shapes": shapes(4)}
    found = meeting("scatter", odd=0, common=common, input_shapes=shapes(5, 5, 5, 5))
    assert found is not None
    assert found.culprits == (0,)


def test_scatter_receiver() -> None:
    """A receiver that expects another size than it is sent is the culprit."""
    records = [
        call(0, "scatter", root=0, input_shapes=shapes(4, 4, 4, 4), output_shapes=shapes(4)),
        *(call(r, "scatter", root=0, output_shapes=shapes(5 if r == 3 else 4)) for r in (1, 2, 3)),
    ]
    found = check_meeting(records)
    assert found is not None
    assert (found.kind, found.culprits) == (Kind.SHAPE_MISMATCH, (3,))


def test_split_matrix() -> None:
    """What rank i sends to j must be what j expects from i; rank 1 contradicts two others."""
    sends = [[1, 1, 1], [2, 0, 1], [1, 1, 1]]
    group = Group("1", "ep", (0, 1, 2))
    records = [
        call(
            r, "all_to_all_single", group=group, input_shapes=shapes(3), output_shapes=shapes(3),
            input_splits=tuple(sends[r]), output_splits=(1, 1, 1),
        )
        for r in range(3)
    ]  # fmt: skip
    found = check_meeting(records)
    assert found is not None
    assert (found.kind, found.culprits) == (Kind.SPLITS_MISMATCH, (1,))


def test_even_all_to_all_single_without_splits() -> None:
    """Without splits everybody sends an equal share: an odd tensor is a shape mismatch."""
    common = {"input_shapes": shapes(8), "output_shapes": shapes(8)}
    assert meeting("all_to_all_single", common=common) is None
    found = meeting("all_to_all_single", common=common, input_shapes=shapes(12), output_shapes=shapes(12))
    assert found is not None
    assert (found.kind, found.culprits) == (Kind.SHAPE_MISMATCH, (2,))


def test_absent_members_are_passed_over() -> None:
    """Half of the members are there: what is there is compared."""
    records = [call(r, "all_reduce", input_shapes=shapes(4 if r else 5), reduce_op="SUM") for r in (0, 1, 2)]
    found = check_meeting(records)
    assert found is not None
    assert found.culprits == (0,)
    assert check_meeting(records[1:]) is None
    assert check_meeting(records[:1]) is None


def test_message_in_the_houses_form() -> None:
    """expected, got, at rank, group, call, file and line."""
    found = meeting("all_reduce", common={"reduce_op": "SUM"}, reduce_op="MAX")
    assert str(found) == (
        "reduce op mismatch: expected SUM, got MAX, at rank 2, group default_pg, call #7 (all_reduce), train.py:10"
    )


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ({"tag": 3}, Kind.P2P_UNMATCHED),
        ({"output_shapes": shapes(5)}, Kind.P2P_SIZE_MISMATCH),
        ({"output_shapes": shapes(4), "dtypes": ("int32",)}, Kind.DTYPE_MISMATCH),
        ({"output_shapes": ((2, 2),)}, None),
        ({}, None),
    ],
)
def test_pair(other: dict[str, Any], kind: Kind | None) -> None:
    """A send and a receive agree in tag, bytes and dtype, whatever their shapes."""
    send = call(0, "send", peer=1, tag=0, input_shapes=shapes(4))
    recv = call(1, "recv", **{"peer": 0, "tag": 0, "output_shapes": shapes(4), **other})
    found = check_pair(send, recv)
    assert (found.kind if found else None) == kind
    if found:
        assert found.culprits == (0, 1)
        assert found.tie
