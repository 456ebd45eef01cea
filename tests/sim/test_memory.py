"""The most that a rank's tensors take: every storage once, from its first operator until it is freed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sim.running import ranks

from distsim.sim.world.conditions import Conditions

MIB = 1 << 20
UNKNOWN_BYTES = 4096
"""Scalars and other small things that torch makes on the way."""


def mib(count: float) -> torch.Tensor:
    return torch.zeros(int(count * MIB), dtype=torch.uint8)


def at_once() -> None:
    kept = [mib(1) for _ in range(5)]
    kept.clear()


def one_after_the_other() -> None:
    for _ in range(5):
        held = mib(1)
        del held


def views() -> None:
    whole = mib(4)
    kept = [whole[:9], whole.view(2, -1).t(), whole.detach()]
    del whole
    held = mib(1)
    del held, kept


def slice_keeps_all() -> None:
    first = mib(4)[:1]
    second = mib(1)
    del first, second


def resized() -> None:
    held = mib(4)
    held.untyped_storage().resize_(0)
    other = mib(3)
    del other
    held.untyped_storage().resize_(5 * MIB)
    held.resize_(6 * MIB)


def no_data() -> None:
    torch.zeros(64 * MIB, device="meta") + 1
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        torch.zeros(64 * MIB) + 1


def from_elsewhere() -> None:
    import numpy

    array = numpy.zeros(2 * MIB, dtype=numpy.uint8)
    held = torch.from_numpy(array)
    held += 1
    listed = torch.tensor([1] * (MIB // 8))
    del listed


def backward() -> None:
    weight = mib(1).view(torch.float32).clone().requires_grad_()  # 2 MiB while it is copied
    (weight * 2.0).square().sum().backward()


def gathered() -> None:
    dist.init_process_group("gloo")
    mine = mib(1)
    everything = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(everything, mine)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("body", "peak_mib"),
    [
        (at_once, 5),
        (one_after_the_other, 1),
        (views, 5),
        (slice_keeps_all, 5),
        (resized, 6),
        (no_data, 0),
        (from_elsewhere, 3),
        (backward, 5),  # weight, its double, its square, and the gradients of the last two that are alive together
        (gathered, 3),
    ],
)
def test_the_peak_is_what_lives_at_once(body: Callable[[], Any], peak_mib: int) -> None:
    """Views share their storage, a slice keeps all of it, what is freed makes room, what has no data takes none."""
    outcome = ranks(body, conditions=Conditions(memory=True))
    for rank in outcome.ranks:
        assert rank.peak_memory_bytes is not None
        assert 0 <= rank.peak_memory_bytes - peak_mib * MIB < UNKNOWN_BYTES


def test_garbage_in_cycles_counts_little_and_always_the_same() -> None:
    """A cycle lives until the collector comes; it comes before the peak has grown by a sixteenth, however many."""

    def litter() -> None:
        for _ in range(40):
            cycle: list[Any] = [mib(1)]
            cycle.append(cycle)
        assert not gc.isenabled()

    seen = [[r.peak_memory_bytes for r in ranks(litter, conditions=Conditions(memory=True)).ranks] for _ in range(2)]
    assert gc.isenabled()
    assert seen[0] == seen[1]
    assert all(MIB <= (peak or 0) <= 2 * MIB + UNKNOWN_BYTES for peak in seen[0])


def lopsided() -> None:
    dist.init_process_group("gloo")
    held = mib(1 + dist.get_rank())
    dist.all_reduce(held[:1])
    dist.destroy_process_group()


def test_every_rank_has_its_own_account() -> None:
    """Rank 2 holds three times what rank 0 holds; without the condition nobody counts."""
    outcome = ranks(lopsided, 3, conditions=Conditions(memory=True))
    assert [(rank.peak_memory_bytes or 0) // MIB for rank in outcome.ranks] == [1, 2, 3]
    assert [rank.peak_memory_bytes for rank in ranks(lopsided, 3).ranks] == [None] * 3
    assert torch.UntypedStorage.resize_.__qualname__ != "Memory.watching.<locals>.resize"


def test_a_shard_takes_less_than_the_whole() -> None:
    """FSDP frees what it gathered, through the storages: four ranks hold less than one rank's replica."""

    def train(sharded: bool) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 256) for _ in range(8)]  # 256 KiB each
        model: Any = torch.nn.Sequential(*layers)
        if sharded:
            for layer in layers:
                fully_shard(layer)
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        step = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 256)).sum().backward()
            step.step()
            step.zero_grad()
        dist.destroy_process_group()

    peaks = []
    for sharded in (True, False):
        outcome = ranks(train, 4, sharded, conditions=Conditions(memory=True))
        assert not outcome.failures
        peaks.append(max(rank.peak_memory_bytes or 0 for rank in outcome.ranks))
    assert peaks[0] < peaks[1] / 2
    assert peaks[1] > 4 * 8 * 256 * 1024  # parameters, gradients and two states of Adam
