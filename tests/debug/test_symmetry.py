"""Who is rank 0 does not matter: renaming ranks renames the culprits and nothing else."""

from __future__ import annotations

import random

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records.kinds import Kind
from tests.debug.builders import Step, all_reduce, barrier, coll, fail, killed, leave, play, recv, send, spin

SIZE = 6
STEP = [all_reduce(10), barrier(11)]

ODD: dict[Kind, tuple[list[Step], list[Step]]] = {
    Kind.MISSING_RANK: (STEP, [all_reduce(10)]),
    Kind.EXTRA_COLLECTIVE: ([all_reduce(10)], STEP),
    Kind.SHAPE_MISMATCH: (STEP, [all_reduce(10, shape=(9,)), barrier(11)]),
    Kind.DTYPE_MISMATCH: (STEP, [all_reduce(10, dtypes=("int64",)), barrier(11)]),
    Kind.REDUCE_OP_MISMATCH: (STEP, [all_reduce(10, reduce_op="MIN"), barrier(11)]),
    Kind.ROOT_MISMATCH: ([coll("broadcast", 10, root=0)], [coll("broadcast", 10, root=3)]),
    Kind.OP_MISMATCH: ([coll("reduce", 10, root=0)], [coll("broadcast", 12, root=0)]),
    Kind.UNEVEN_ITERATIONS: ([all_reduce(10)] * 4, [all_reduce(10)] * 2),
    Kind.RANK_RAISED: (STEP, [fail("E: e", 5)]),
    Kind.RANK_EXITED: (STEP, [leave(1, 5)]),
    Kind.RANK_KILLED: (STEP, [killed()]),
    Kind.HOST_STUCK: (STEP, [spin(5)]),
    Kind.WRONG_ORDER: ([all_reduce(10), all_reduce(12)], [all_reduce(12), all_reduce(10)]),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("odd", range(SIZE))
def test_any_rank_may_be_the_odd_one(kind: Kind, odd: int) -> None:
    """The same fault on another rank is the same diagnosis with that rank as culprit."""
    most, one = ODD[kind]
    (d,) = diagnose(play(SIZE, lambda r: one if r == odd else most))
    assert (d.kind, d.culprits) == (kind, (odd,))


@pytest.mark.parametrize("seed", range(8))
def test_renamed_cycle_is_the_same_cycle(seed: int) -> None:
    """A ring of blocking sends over renamed ranks is one cycle over all of them."""
    names = list(range(SIZE))
    random.Random(seed).shuffle(names)
    after = {names[i]: names[(i + 1) % SIZE] for i in range(SIZE)}
    before = {b: a for a, b in after.items()}
    (d,) = diagnose(play(SIZE, lambda r: [send(after[r], 10), recv(before[r], 11)]))
    assert d.kind is Kind.DEADLOCK_CYCLE
    assert d.cycle is not None
    assert d.culprits == tuple(range(SIZE))
    assert all(after[a] == b for a, b in zip(d.cycle, d.cycle[1:], strict=False))


@pytest.mark.parametrize("seed", range(8))
def test_records_may_come_in_any_rank_order(seed: int) -> None:
    """The order of the mappings does not matter: the same report, byte for byte."""
    evidence = play(SIZE, lambda r: [all_reduce(10)] if r in (1, 4) else STEP)
    expected = [d.to_json() for d in diagnose(evidence)]
    ranks = list(range(SIZE))
    random.Random(seed).shuffle(ranks)
    evidence.records = {r: evidence.records[r] for r in ranks}
    evidence.ranks = {r: evidence.ranks[r] for r in ranks}
    assert [d.to_json() for d in diagnose(evidence)] == expected
