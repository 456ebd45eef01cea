"""The rules by which calls agree, each as a table: votes, splits, sizes, texts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from distsim.debug.matching import agreement
from distsim.debug.matching.agreement import Vote, blame_conflicts, check_pair, itemsize, majority, payload_text
from distsim.debug.records import CallRecord, Group
from distsim.debug.records.kinds import Kind

Splits = tuple[int, ...] | None
FOUR = Group("0", "default_pg", (0, 1, 2, 3))


def call(rank: int = 0, op: str = "all_to_all_single", **kw: Any) -> CallRecord:
    return CallRecord(rank, FOUR, 1, op, **kw)


@pytest.mark.parametrize("dtype", sorted({str(d) for d in vars(torch).values() if isinstance(d, torch.dtype)}))
def test_an_element_has_torchs_bytes(dtype: str) -> None:
    """Of every dtype that collectives are recorded with; one that is not known has a byte."""
    known = dtype.removeprefix("torch.") in agreement._ITEMSIZE
    assert itemsize(dtype) == (getattr(torch, dtype.removeprefix("torch.")).itemsize if known else 1)


@pytest.mark.parametrize(
    ("values", "reference", "culprits", "tie"),
    [
        ({0: "a"}, (0,), (), False),
        ({0: "a", 1: "b"}, (0,), (1,), True),
        ({3: "a", 1: "b"}, (3,), (1,), True),
        ({0: "a", 1: "b", 2: "a"}, (0, 2), (1,), False),
        ({0: "a", 1: "b", 2: "b", 3: "c"}, (1, 2), (0, 3), False),
        ({2: "a", 1: "b", 0: "b", 3: "a", 4: "c"}, (2, 3), (0, 1, 4), True),
    ],
)
def test_the_largest_side_is_the_reference(
    values: dict[int, str], reference: tuple[int, ...], culprits: tuple[int, ...], tie: bool
) -> None:
    """Of two equal ones that with the first rank of the group, and that is a tie."""
    assert majority(values) == Vote(reference, culprits, tie)


@pytest.mark.parametrize(
    ("conflicts", "innocent", "odd", "culprits", "tie"),
    [
        ([], None, (), (), False),
        ([(0, 1)], None, (), (1,), True),
        ([(0, 1)], None, (0,), (0,), False),
        ([(0, 1)], None, (2,), (1,), True),
        ([(2, 0), (1, 2)], None, (), (2,), False),
        ([(1, 1), (2, 0), (2, 3)], None, (), (1, 2), False),  # a rank that contradicts itself, before all others
        ([(1, 1), (0, 3)], None, (), (1, 3), True),
        ([(0, 3), (1, 1), (1, 2)], None, (), (1, 3), True),
        ([(0, 1), (0, 2)], 0, (), (1, 2), False),  # a root is blamed beyond half of the group alone
        ([(0, 1), (0, 2), (0, 3)], 0, (), (0,), False),
        ([(0, 1), (0, 2)], 3, (), (0,), False),
    ],
)
def test_the_fewest_ranks_are_blamed(
    conflicts: list[tuple[int, int]],
    innocent: int | None,
    odd: Collection[int],
    culprits: tuple[int, ...],
    tie: bool,
) -> None:
    """Without them no two of the others contradict each other."""
    reference = tuple(rank for rank in range(4) if rank not in culprits)
    assert blame_conflicts(range(4), conflicts, innocent, odd) == Vote(reference, culprits, tie)


@pytest.mark.parametrize(
    ("op", "num_ranks", "splits", "shapes", "elements"),
    [
        ("all_to_all", 2, None, ((2, 3), (4,)), (6, 4)),
        ("all_to_all", 3, None, ((2, 3), (4,)), None),
        ("all_to_all_single", 2, None, ((4,),), (2, 2)),
        ("all_to_all_single", 2, None, ((5,),), None),
        ("all_to_all_single", 2, None, ((6, 3, 5),), (45, 45)),
        ("all_to_all_single", 2, (1, 2), ((3, 5),), (5, 10)),
        ("all_to_all_single", 2, (1, 2, 3), ((6,),), None),
        ("all_to_all_single", 2, (1, 2), (), (1, 2)),
        ("all_to_all_single", 2, (1, 2), ((2,), (1,)), (1, 2)),
        ("all_to_all_single", 2, (3,), (), None),
        ("all_to_all_single", 2, None, (), None),
        ("all_to_all_single", 2, None, ((),), None),
        ("all_to_all_single", 1, None, ((),), (1,)),
        ("all_to_all_single", 0, None, ((4,),), None),
    ],
)
def test_elements_for_each_rank(op: str, num_ranks: int, splits: Splits, shapes: Any, elements: Splits) -> None:
    """A row of the tensor has as many elements as its other dimensions; equal shares where no splits are given."""
    assert agreement._splits(call(op=op), num_ranks, splits, shapes) == elements


@pytest.mark.parametrize(
    ("sizes", "irregular"),
    [((4, 4, 4, 5), {3}), ((4, 4, 5), {2}), ((4, 5, 6, 4), set()), ((4, 5), set()), ((4,), set())],
)
def test_ranks_beside_more_than_half_are_irregular(sizes: tuple[int, ...], irregular: set[int]) -> None:
    """Half is not most."""
    assert agreement._irregular([call(r, input_shapes=((n,),)) for r, n in enumerate(sizes)]) == irregular


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, "no tensor"),
        ({"nbytes": 8}, "8 B"),
        ({"nbytes": 8, "dtypes": ("int8",)}, "int8"),
        ({"input_shapes": ((4, 8),), "output_shapes": ((2,),), "dtypes": ("int8",)}, "int8[4,8]"),
        ({"output_shapes": ((2,), (3,), ())}, "[2], [3], []"),
        ({"output_shapes": ((2,), (3,), (), (5,))}, "[2], [3], [], ... 4 in all"),
    ],
)
def test_a_payload_as_text(facts: dict[str, Any], text: str) -> None:
    """What goes in, or else what comes out; three tensors at most."""
    assert payload_text(call(**facts)) == text


@pytest.mark.parametrize(
    ("splits", "text"),
    [
        ((), "equal shares"),
        ((1, 2), "[1, 2]"),
        (tuple(range(8)), "[0, 1, 2, 3, 4, 5, 6, 7]"),
        (tuple(range(9)), "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
    ],
)
def test_splits_as_text(splits: tuple[int, ...], text: str) -> None:
    """Eight at most."""
    assert agreement._brief(splits) == text


FLOATS = {"shapes": ((4,),), "dtypes": ("float32",)}


@pytest.mark.parametrize(
    ("sent", "received", "kind"),
    [
        (FLOATS, FLOATS, None),
        (FLOATS, {"shapes": ((2, 2),), "dtypes": ("float32",)}, None),
        (FLOATS, {"shapes": ((2,),), "dtypes": ("float64",)}, Kind.DTYPE_MISMATCH),
        (FLOATS, {"shapes": ((4,),), "dtypes": ("float64",)}, Kind.P2P_SIZE_MISMATCH),
        (FLOATS, {"shapes": ((3,), (1,)), "dtypes": ("float32",)}, None),
        (FLOATS, {"nbytes": 16}, None),
        (FLOATS, {"nbytes": 17}, Kind.P2P_SIZE_MISMATCH),
        (FLOATS, {"shapes": ((4,),), "nbytes": 16}, None),
        (FLOATS, {"dtypes": ("float32",), "nbytes": 4}, Kind.P2P_SIZE_MISMATCH),
        ({**FLOATS, "tag": 1}, {**FLOATS, "tag": 2}, Kind.P2P_UNMATCHED),
        ({**FLOATS, "tag": 1}, {**FLOATS, "tag": 1}, None),
        ({**FLOATS, "tag": None}, {**FLOATS, "tag": 2}, None),
        ({**FLOATS, "tag": 1}, {**FLOATS, "tag": None}, None),
    ],
)
def test_the_ends_of_a_message(sent: dict[str, Any], received: dict[str, Any], kind: Kind | None) -> None:
    """Tags first, then bytes, then the dtype; what is not known differs from nothing."""
    (ins, *one), (outs, *other) = (
        (end.get("shapes", ()), {key: value for key, value in end.items() if key != "shapes"})
        for end in (sent, received)
    )
    mismatch = check_pair(
        call(0, "send", peer=1, input_shapes=ins, **one[0]), call(1, "recv", peer=0, output_shapes=outs, **other[0])
    )
    assert (None if mismatch is None else mismatch.kind) == kind
    if mismatch is not None:
        assert (mismatch.culprits, mismatch.reference, mismatch.tie) == ((0, 1), (), True)
        assert mismatch.actual.keys() == {0, 1}
        assert mismatch.expected == mismatch.actual[1]
