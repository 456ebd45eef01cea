"""Errors of models that differ between ranks, as DistributedDataParallel raises them."""

from __future__ import annotations

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import Evidence
from distsim.debug.records.kinds import Kind, Proof
from tests.debug.builders import all_reduce, coll, fail, play

DDP_COUNT = (
    "RuntimeError: DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has inconsistent "
    "{} params."
)
DDP_SIZES = (
    "RuntimeError: [{}]: params[0] in this process with sizes [{}, 16] appears not to match sizes of the same param in "
    "process 0."
)


def test_every_rank_raises_over_one_odd_model() -> None:
    """DDP's check raises on every rank: the rank with another number of parameters is named, once."""
    counts = {0: 4, 1: 2, 2: 4}
    other = {0: 1, 1: 0, 2: 1}
    programs = {r: [fail(DDP_COUNT.format(r, counts[r], other[r], counts[other[r]]), 10)] for r in counts}
    (d,) = diagnose(play(3, programs))
    assert (d.kind, d.culprits, d.victims, d.exit_code) == (Kind.RANK_RAISED, (1,), (0, 2), 1)
    assert "4 on ranks 0,2; 2 on rank 1" in d.explanation
    assert d.suggestion.startswith("Build the same model on rank 1 as on ranks 0,2")


def test_all_but_rank_0_raise_over_its_odd_model() -> None:
    """They compare with rank 0 and agree with each other: its model is the odd one. A few that raise are odd."""
    many = {r: [fail(DDP_SIZES.format(r, 10), 10)] if r else [coll("broadcast", 10, root=0)] for r in range(4)}
    (d,) = diagnose(play(4, many))
    assert (d.kind, d.culprits, d.victims) == (Kind.SHAPE_MISMATCH, (0,), (1, 2, 3))
    few = {r: [fail(DDP_SIZES.format(r, 11), 10)] if r == 2 else [all_reduce(11)] for r in range(4)}
    (d,) = diagnose(play(4, few))
    assert (d.kind, d.culprits) == (Kind.RANK_RAISED, (2,))


def odd_models(counts: dict[int, int], size: int) -> Evidence:
    """Each of these ranks raised over its number of parameters; the others wait in the broadcast of DDP's check."""
    texts = {rank: DDP_COUNT.format(rank, count, 0, counts.get(0, 4)) for rank, count in counts.items()}
    return play(size, {r: [fail(texts[r], 10)] if r in texts else [coll("broadcast", 10, root=0)] for r in range(size)})


@pytest.mark.parametrize(
    ("counts", "culprits", "tie"),
    [
        ({0: 4, 1: 2}, (1,), True),
        ({0: 4, 1: 2, 2: 2}, (0,), False),
        ({0: 4, 1: 2, 2: 3}, (1, 2), True),
        ({0: 4, 1: 4, 2: 2, 3: 2}, (2, 3), True),
        ({0: 4, 1: 4, 2: 2, 3: 3}, (2, 3), False),
        ({0: 2, 1: 4, 2: 4, 3: 4}, (0,), False),
    ],
)
def test_the_model_of_most_ranks_is_the_right_one(counts: dict[int, int], culprits: tuple[int, ...], tie: bool) -> None:
    """By the number of parameters; of sides that are equally large the first, and that is said."""
    (d,) = diagnose(odd_models(counts, len(counts)))
    assert (d.kind, d.culprits) == (Kind.RANK_RAISED, culprits)
    assert d.victims == tuple(rank for rank in counts if rank not in culprits)
    assert ("split evenly" in d.explanation) is tie
    assert d.sites.keys() == counts.keys()


def test_models_with_one_number_of_parameters_accuse_nobody_else() -> None:
    """Each rank that raised is named for itself, as the number of the others is not known."""
    first = diagnose(odd_models({1: 2, 2: 2}, 4))[0]
    assert "models that DDP wraps differ" not in first.explanation


@pytest.mark.parametrize(
    ("sizes", "size", "is_rank_0"),
    [
        ({1: 10, 2: 10}, 3, True),
        ({1: 10, 2: 11}, 3, False),
        ({0: 10, 1: 10}, 3, False),
        ({1: 10, 2: 10}, 4, False),
        ({1: 10, 2: 10, 3: 10}, 5, True),
    ],
)
def test_rank_0_has_the_odd_model_if_most_agree(sizes: dict[int, int], size: int, is_rank_0: bool) -> None:
    """More than half of the world, with equal sizes, and not rank 0 itself."""
    programs = {r: [fail(DDP_SIZES.format(r, sizes[r]), 10)] if r in sizes else [all_reduce(11)] for r in range(size)}
    told = diagnose(play(size, programs))
    found = [(d.culprits, d.victims, d.proof) for d in told if d.kind is Kind.SHAPE_MISMATCH]
    assert [culprits for culprits, _, _ in found] == [(0,)] * is_rank_0
    if is_rank_0:
        assert set(sizes) <= set(found[0][1])
        assert found[0][2] is Proof.MET
        assert len(told) == 1
