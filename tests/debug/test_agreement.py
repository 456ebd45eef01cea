"""The rules by which calls agree, each as a table: votes, splits, sizes, texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest
import torch

from distsim.debug.divergence.find import find_divergences
from distsim.debug.matching import agreement
from distsim.debug.matching.agreement import (
    Vote,
    blame_conflicts,
    check_meeting,
    check_pair,
    itemsize,
    majority,
    payload_text,
    split_conflicts,
)
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.records import CallRecord, Evidence, Group, Site
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


F4: Any = {"input_shapes": ((4,),), "dtypes": ("float32",)}
DIFFER: list[tuple[str, str, list[dict[str, Any]], Kind | None, tuple[int, ...]]] = [
    # operation, arguments of ranks 0, 1, 2 -> kind, culprits
    ("all alike", "all_reduce", [F4, F4, F4], None, ()),
    ("shape", "all_reduce", [F4, {**F4, "input_shapes": ((5,),)}, F4], Kind.SHAPE_MISMATCH, (1,)),
    ("ones do not count", "all_reduce", [F4, {**F4, "input_shapes": ((1, 4, 1),)}, F4], None, ()),
    ("order of sizes", "all_reduce", [{"input_shapes": ((2, 3),)}] * 2 + [{"input_shapes": ((3, 2),)}],
     Kind.SHAPE_MISMATCH, (2,)),
    ("elements of a broadcast", "broadcast", [{"input_shapes": (shape,)} for shape in ((2, 3), (2, 3), (3, 2))],
     None, ()),
    ("more elements", "broadcast", [{"input_shapes": ((2, 3),)}] * 2 + [{"input_shapes": ((3, 3),)}],
     Kind.SHAPE_MISMATCH, (2,)),
    ("what comes out", "all_reduce", [{"output_shapes": ((4,),)}] * 2 + [{"output_shapes": ((5,),)}],
     Kind.SHAPE_MISMATCH, (2,)),
    ("what goes in, first", "reduce_scatter_tensor", [{**F4, "output_shapes": ((n,),)} for n in (1, 1, 2)], None, ()),
    ("dtype", "all_reduce", [{**F4, "dtypes": ("int32",)}, F4, F4], Kind.DTYPE_MISMATCH, (0,)),
    ("dtype unknown", "all_reduce", [{**F4, "dtypes": ()}, F4, F4], None, ()),
    ("dtypes of equal tensors", "all_reduce", [{**F4, "dtypes": ("float32", "float32")}, F4, F4], None, ()),
    ("dtypes of tensors", "all_reduce", [{**F4, "dtypes": ("float32", "int8")}, F4, F4], Kind.DTYPE_MISMATCH, (0,)),
    ("reduction", "all_reduce", [{**F4, "reduce_op": op} for op in ("SUM", "MAX", "SUM")],
     Kind.REDUCE_OP_MISMATCH, (1,)),
    ("reduction unknown", "all_reduce", [{**F4, "reduce_op": op} for op in ("SUM", None, "SUM")], None, ()),
    ("no reduction", "all_gather_into_tensor", [{**F4, "reduce_op": op} for op in ("SUM", "MAX", "SUM")], None, ()),
    ("root", "broadcast", [{**F4, "root": root} for root in (0, 1, 0)], Kind.ROOT_MISMATCH, (1,)),
    ("root unknown", "broadcast", [{**F4, "root": root} for root in (0, 1, None)], None, ()),
    ("root before shape", "broadcast", [{**F4, "root": 0}] * 2 + [{"input_shapes": ((5,),), "root": 1}],
     Kind.ROOT_MISMATCH, (2,)),
    ("shape before dtype", "all_reduce", [F4, F4, {"input_shapes": ((5,),), "dtypes": ("int8",)}],
     Kind.SHAPE_MISMATCH, (2,)),
    ("a barrier has no shape", "barrier", [F4, {}, F4], None, ()),
    ("new groups", "new_group", [{"new_ranks": ranks} for ranks in ((0, 1), (0, 1), (0, 2))],
     Kind.GROUP_CREATION_ORDER, (2,)),
    ("new groups of one", "new_group", [{"new_ranks": (rank,)} for rank in range(3)], None, ()),
    ("a new group of one", "new_group", [{"new_ranks": ranks} for ranks in ((0, 1), (0, 1), (2,))],
     Kind.GROUP_CREATION_ORDER, (2,)),
    ("what lists go to", "reduce_scatter", [{"input_shapes": ((2,),) * 3, "output_shapes": ((n,),)} for n in (2, 3, 2)],
     Kind.SHAPE_MISMATCH, (1,)),
    ("where a tensor goes", "reduce_scatter", [{"input_shapes": ((6,),), "output_shapes": ((n,),)} for n in (2, 3, 2)],
     None, ()),
]  # fmt: skip


@pytest.mark.parametrize(("law", "op", "arguments", "kind", "culprits"), DIFFER, ids=[row[0] for row in DIFFER])
def test_calls_of_a_meeting_differ(
    law: str, op: str, arguments: list[dict[str, Any]], kind: Kind | None, culprits: tuple[int, ...]
) -> None:
    """In one aspect at a time; the rank that differs is the culprit, in whatever order the calls are."""
    group = Group("0", "default_pg", (0, 1, 2))
    calls = [CallRecord(rank, group, 7, op, **one) for rank, one in enumerate(arguments)]
    for order in (calls, calls[::-1]):
        mismatch = check_meeting(order)
        assert (mismatch and mismatch.kind) == kind
        if mismatch is not None:
            assert (mismatch.culprits, mismatch.tie, mismatch.seq) == (culprits, False, 7)
            assert mismatch.reference == tuple(rank for rank in range(3) if rank not in culprits)
            assert mismatch.actual.keys() == set(culprits)
            assert mismatch.expected not in mismatch.actual.values()
            other = mismatch.swapped()
            assert (other.culprits, other.reference) == (mismatch.reference, mismatch.culprits)
            assert (other.expected, other.tie) == (mismatch.actual[culprits[0]], False)
            assert set(other.actual.values()) == {mismatch.expected}
    assert check_meeting(calls[:1]) is None


def test_operations_differ_before_all_else() -> None:
    """Whatever their arguments."""
    calls = [call(0, "broadcast", root=0, **F4), call(1, "all_reduce"), call(2, "broadcast", root=1, **F4)]
    mismatch = check_meeting(calls)
    assert mismatch is not None
    assert (mismatch.kind, mismatch.culprits, mismatch.actual) == (Kind.OP_MISMATCH, (1,), {1: "all_reduce"})
    assert str(mismatch).endswith(
        "expected broadcast, got all_reduce, at rank 1, group default_pg, call #1 (all_reduce)"
    )


AT = Site("train.py", 5, "main")
PAIR = Group("0", "default_pg", (0, 1))
HABITS: list[tuple[str, dict[int, list[dict[str, Any]]], tuple[int, ...], bool]] = [
    # earlier calls of ranks 0 and 1, whose calls now are of 4 and 5 elements -> culprits, tie
    ("nothing is known", {}, (1,), True),
    ("both as always", {0: [{"n": 4}], 1: [{"n": 5}]}, (1,), True),
    ("the first left its habit", {0: [{"n": 5}]}, (0,), False),
    ("the second did", {1: [{"n": 4}]}, (1,), False),
    ("both did", {0: [{"n": 5}], 1: [{"n": 4}]}, (1,), True),
    ("it had both", {0: [{"n": 5}, {"n": 4}]}, (1,), True),
    ("a later call", {0: [{"n": 5, "index": 11}]}, (1,), True),
    ("the same number", {0: [{"n": 5, "index": 10}]}, (1,), True),
    ("another line", {0: [{"n": 5, "site": Site("train.py", 6, "main")}]}, (1,), True),
    ("another group's", {0: [{"n": 5, "group": Group("1", "", (1, 0))}]}, (1,), True),
    ("a group with these ranks", {0: [{"n": 5, "group": Group("1", "", (0, 1))}]}, (0,), False),
]


@pytest.mark.parametrize(("law", "past", "culprits", "tie"), HABITS, ids=[row[0] for row in HABITS])
def test_a_tie_is_settled_by_habit(
    law: str, past: Mapping[int, Sequence[Mapping[str, Any]]], culprits: tuple[int, ...], tie: bool
) -> None:
    """Of two ranks the one is wrong that has always made another call at this line, if the other has not."""

    def made(rank: int, *, n: int, **kw: Any) -> CallRecord:
        values = {"site": AT, "index": 1, "group": PAIR, **kw}
        return CallRecord(rank, values.pop("group"), 1, "all_reduce", input_shapes=((n,),), **values)

    calls = [made(0, n=4, index=10), made(1, n=5, index=10)]
    histories = {rank: [*(made(rank, **one) for one in some), calls[rank]] for rank, some in past.items()}
    mismatch = check_meeting(calls, histories)
    assert mismatch is not None
    assert (mismatch.culprits, mismatch.tie) == (culprits, tie)


def lists(*shapes: tuple[Sequence[int], int | None]) -> list[CallRecord]:
    """An all_gather of ranks 0, 1, 2, with the elements of each rank's list and of its own tensor."""
    group = Group("0", "default_pg", (0, 1, 2))
    return [
        CallRecord(
            rank,
            group,
            1,
            "all_gather",
            output_shapes=tuple((n,) for n in several),
            input_shapes=() if own is None else ((own,),),
            root=0,
        )
        for rank, (several, own) in enumerate(shapes)
    ]


OF_LISTS: list[tuple[str, list[CallRecord], tuple[int, ...] | None]] = [
    ("all fit", lists(([1, 2, 3], 1), ([1, 2, 3], 2), ([1, 2, 3], 3)), None),
    ("one list does not", lists(([1, 2, 3], 1), ([1, 2, 4], 2), ([1, 2, 3], 3)), (1,)),
    ("one tensor does not", lists(([1, 2, 3], 1), ([1, 2, 3], 2), ([1, 2, 3], 4)), (2,)),
    ("equal calls, whose lists fit no tensor", lists(([1, 1, 2], 1), ([1, 1, 2], 1), ([1, 1, 2], 1)), (2,)),
    ("a tensor is not known", lists(([1, 2, 3], 1), ([1, 2, 3], None), ([1, 2, 3], 3)), None),
    ("a rank is not there", lists(([1, 2, 3], 1), ([1, 2, 3], 2)), None),
    ("one list: its holder is the reference", lists(([1, 2, 3], 1), ([], 2), ([], 4)), (2,)),
    ("unless it is wrong about most", lists(([1, 3, 3], 1), ([], 2), ([], 4)), (0,)),
    ("no list: sizes must be equal", lists(([], 1), ([], 1), ([], 2)), (2,)),
    ("no list, all equal", lists(([], 1), ([], 1), ([], 1)), None),
    ("lists of another length hold nothing", lists(([1, 2], 1), ([1, 2], 1), ([1, 2], 1)), None),
]


@pytest.mark.parametrize(("law", "calls", "culprits"), OF_LISTS, ids=[row[0] for row in OF_LISTS])
def test_a_list_is_compared_with_tensors(law: str, calls: list[CallRecord], culprits: tuple[int, ...] | None) -> None:
    """Tensor j of a list is as large as that of group rank j; most lists, or a tensor that most lists bear out."""
    mismatch = check_meeting(calls)
    assert (mismatch and mismatch.culprits) == culprits
    index = EvidenceIndex(Evidence(3, {}, {one.rank: [one] for one in calls}))
    divergences = find_divergences(index, index.group_logs[0])
    assert [d.culprits for d in divergences] == ([] if culprits is None else [culprits])
    if mismatch is not None:
        assert mismatch.kind is Kind.SHAPE_MISMATCH
        unlike = len({(one.input_shapes, one.output_shapes) for one in calls}) > 1
        assert (mismatch.expected not in mismatch.actual.values()) is unlike


def exchange(*splits: tuple[Splits, Splits]) -> list[CallRecord]:
    """An all_to_all_single of four ranks, with their input and output splits and as many elements."""
    calls = []
    for rank, (ins, outs) in enumerate(splits):
        shapes: Any = {
            "input_shapes": ((sum(ins or (4,)),),),
            "output_shapes": ((sum(outs or (4,)),),),
            "input_splits": ins,
            "output_splits": outs,
        }
        calls.append(call(rank, **shapes))
    return calls


def test_splits_are_compared_in_pairs() -> None:
    """What a rank sends to another is what that one expects."""
    even: tuple[Splits, Splits] = ((1, 1, 1, 1), (1, 1, 1, 1))
    assert split_conflicts(exchange(*[even] * 4)) == []
    assert split_conflicts(exchange(even, even, (None, None), even)) == []
    conflicts = split_conflicts(exchange(even, ((1, 1, 2, 1), (1, 1, 1, 1)), even, even))
    assert [(c.sender, c.receiver, c.sent, c.expected) for c in conflicts] == [(1, 2, 2, 1)]
    mismatch = check_meeting(exchange(even, ((1, 1, 2, 1), (1, 1, 1, 1)), even, even))
    assert mismatch is not None
    assert (mismatch.kind, mismatch.culprits, mismatch.tie) == (Kind.SPLITS_MISMATCH, (1,), False)
    assert mismatch.actual == {1: "sends [1, 1, 2, 1], expects [1, 1, 1, 1]"}
    some = exchange(even, ((1, 1, 2, 1), (1, 1, 1, 1)), even)  # the last rank is not there
    assert [(c.sender, c.receiver) for c in split_conflicts(some)] == [(1, 2)]
    shares = [call(rank, input_shapes=((n,),), output_shapes=((n,),)) for rank, n in enumerate((4, 4, 8, 4))]
    mismatch = check_meeting(shares)
    assert mismatch is not None
    assert (mismatch.kind, mismatch.culprits) == (Kind.SHAPE_MISMATCH, (2,))
