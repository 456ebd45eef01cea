"""Silent faults on simulated GPUs without values: equal origins mean equal values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from distsim.debug.diagnosis.silent.collect.sketch import WIDTH
from distsim.sim.observe.origins import CONSTANT, Meeting, Origin, Parts, Received, first_difference, resolve, slice_of
from distsim.sim.run import simulate


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "kinds"), [(1.0, []), (0.5, ["replicas_diverge"])])
def test_a_number_of_an_operator_on_lists_counts(factor: float, kinds: list[str]) -> None:
    """One rank scales its reduced gradients by another number, all at once."""

    def body() -> None:
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).cuda(), device_ids=[rank])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 4, device="cuda")).sum().backward()
            torch._foreach_mul_([p.grad for p in model.parameters()], factor if rank else 1.0)
            optimizer.step()

    outcome = simulate(body, "dgx-h100:1", nproc_per_node=2, silent="watch")
    assert [finding.kind.value for finding in outcome.silent] == kinds


def leaf(name: str, order: int = 0) -> Origin:
    """Return the origin of a value that has no sources."""
    return Origin(name, (), (), None, order)


def sketches(*origins: Origin) -> list[tuple[float, ...]]:
    """Return the sketches of *origins* after the run."""
    vectors = [(np.zeros(WIDTH, dtype=np.float32), origin) for origin in origins]
    resolve(vectors)
    return [tuple(vector.tolist()) for vector, _ in vectors]


def gathered(op: str, rank: int, *brought: Origin) -> Received:
    """Return the result of a collective of tensors of eight bytes, as *rank* receives it."""
    meeting = Meeting(0, op, 0, len(brought))
    meeting.inputs = {index: [[(0, 8, origin)]] for index, origin in enumerate(brought)}
    return Received(meeting, rank, (0, 0), (0, 8, 8), None, 0)


def test_a_result_of_an_all_reduce_is_equal_on_all_members() -> None:
    """It is another value than each input, and than the sum of other inputs."""
    one, other = leaf("one"), leaf("other")
    of_first, of_second = gathered("all_reduce", 0, one, other), gathered("all_reduce", 1, one, other)
    first, second, alone, third = sketches(of_first, of_second, one, gathered("all_reduce", 0, one, one))
    assert first == second
    assert len({first, alone, third}) == 3


def test_a_result_of_a_broadcast_is_the_value_of_its_root() -> None:
    """A copy is no new value."""
    one, other = leaf("one"), leaf("other")
    first, root = sketches(gathered("broadcast", 1, one, other), one)
    assert first == root


def test_what_a_missing_member_brought_is_unknown_but_equal_for_all() -> None:
    """A rank that another stands for brings nothing."""
    meeting = Meeting(0, "all_reduce", 0, 3)
    meeting.inputs = {0: [[(0, 8, leaf("one"))]]}
    results = [Received(meeting, rank, (0, 0), (0, 8, 8), None, 0) for rank in (0, 1)]
    assert len(set(sketches(*results))) == 1


def test_a_part_of_joined_values_is_the_value_that_was_joined() -> None:
    """Flattened gradients are their own again behind the bucket."""
    one, other = leaf("one"), leaf("other")
    joined = Parts(16, [(0, 8, one), (8, 16, other)], 1)
    assert slice_of(joined.pieces, 8, 16) is other
    across = slice_of(joined.pieces, 4, 12)
    again = slice_of([(0, 4, slice_of([(0, 8, one)], 4, 8)), (4, 8, slice_of([(0, 8, other)], 0, 4))], 0, 8)
    assert len(set(sketches(across, again))) == 1
    assert len(set(sketches(across, joined))) == 2


def test_each_part_of_a_constant_is_the_constant() -> None:
    """Memory of zeros is equal however it is cut."""
    zeros = Origin(CONSTANT, 0.0, (), None, 0)
    assert slice_of([(0, 4, zeros), (4, 8, zeros)], 1, 7) is zeros
    assert sketches(zeros) == [(0.0,) * WIDTH]


def test_the_first_operator_that_differs_is_named() -> None:
    """What only follows from a difference is not."""
    code = (test_the_first_operator_that_differs_is_named.__code__, 7)
    left, right = (Origin("dropout", seed, (leaf("x"),), code, 1) for seed in (1, 2))
    sums = [Origin("sum", (), (origin,), code, 2) for origin in (left, right)]
    difference = first_difference(*sums)
    assert difference is not None
    assert difference[0] == "dropout"
