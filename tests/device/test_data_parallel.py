"""torch.nn.DataParallel: several GPUs of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distsim


def network() -> nn.Module:
    """Return a network of a few layers."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def steps(model: nn.Module, device: str) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.arange(60.0).view(10, 6).sin()
    for _ in range(2):
        optimizer.zero_grad()
        output = model(inputs.to(device))
        output.square().sum().backward()
        optimizer.step()
    return [output.detach().cpu(), *(p.detach().cpu() for p in model.parameters())]


@pytest.mark.parametrize("gpus", [1, 4])
def test_values_and_devices(gpus: int) -> None:
    """A step of replicas gives the CPU's values, and each of the GPUs has computed its part."""
    model = network()

    def train() -> Any:
        parallel = nn.DataParallel(copy.deepcopy(model).cuda(), device_ids=list(range(gpus)))
        results = steps(parallel, "cuda")
        used = [torch.cuda.max_memory_allocated(device) > 0 for device in range(4)]
        return results, used

    ((results, used),) = distsim.simulate(train, "dgx-h100:1", nproc_per_node=1, data="real").results
    for here, there in zip(steps(copy.deepcopy(model), "cpu"), results, strict=True):
        assert torch.allclose(here, there, atol=1e-5)
    assert used == [number < gpus for number in range(4)]


def test_steps_are_measured() -> None:
    """Without values, too, each step of the optimizer counts, and nothing warns of NCCL."""

    def train() -> list[int]:
        return [len(part) for part in steps(nn.DataParallel(network().cuda(), device_ids=[0, 1]), "cuda")]

    outcome = distsim.simulate(train, "dgx-h100:1", nproc_per_node=1)
    assert outcome.results == [[10, 8, 8, 8, 8, 3, 3]]
    assert outcome.training is not None


def test_copies_between_gpus() -> None:
    """`torch.nn.parallel.comm` scatters, gathers and broadcasts, with `out` as without."""

    def copies() -> list[Any]:
        comm = torch.nn.parallel.comm
        x = torch.arange(12.0, device="cuda:0").view(6, 2)
        parts = comm.scatter(x, [0, 1], chunk_sizes=[2, 4])
        buffers = [torch.empty(3, 2, device=f"cuda:{device}") for device in (2, 3)]
        comm.scatter(x, out=buffers)
        everywhere = comm.broadcast(x, [0, 5])
        targets = [x, torch.empty_like(x, device="cuda:6")]
        comm.broadcast(x, out=targets)
        gathered = [comm.gather(parts), comm.gather(parts, destination="cpu"), comm.reduce_add(everywhere, 5)]
        out = torch.empty(6, 2, device="cuda:7")
        comm.gather(buffers, out=out)
        shown = [*parts, *buffers, *everywhere, *targets, *gathered, out]
        return [(str(each.device), each[-1, -1].item(), len(each)) for each in shown]

    (answers,) = distsim.simulate(copies, "dgx-h100:1", nproc_per_node=1, data="real").results
    assert answers == [
        ("cuda:0", 3.0, 2), ("cuda:1", 11.0, 4), ("cuda:2", 5.0, 3), ("cuda:3", 11.0, 3), ("cuda:0", 11.0, 6),
        ("cuda:5", 11.0, 6), ("cuda:0", 11.0, 6), ("cuda:6", 11.0, 6), ("cuda:0", 11.0, 6), ("cpu", 11.0, 6),
        ("cuda:5", 22.0, 6), ("cuda:7", 11.0, 6),
    ]  # fmt: skip


def test_a_stream_waits_for_another_gpus_event() -> None:
    """It goes on when the other GPU has come to the event, also where the host waits for the first alone."""

    def waits() -> list[bool]:
        slow, fast = torch.cuda.Event(), torch.cuda.Event()
        with torch.cuda.device(1):
            torch.cuda._sleep(10_000_000)
            slow.record()
        torch.cuda.current_stream(0).wait_event(slow)
        fast.record(torch.cuda.current_stream(0))
        before = [slow.query(), fast.query()]
        torch.cuda.synchronize(0)
        return [*before, slow.query(), fast.query()]

    assert distsim.simulate(waits, "dgx-h100:1", nproc_per_node=1).results == [[False, False, True, True]]
