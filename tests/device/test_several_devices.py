"""Several simulated GPUs a rank: the collectives that go over all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

import distsim


def body() -> list[list[float]]:
    """Each of two ranks has two of the node's GPUs."""
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    gpus = [torch.device("cuda", 2 * rank + j) for j in range(2)]
    tensors = [torch.full((2,), 10.0 * rank + j, device=gpu) for j, gpu in enumerate(gpus)]
    dist.all_reduce_multigpu(tensors)  # type: ignore[attr-defined]
    assert [t.device for t in tensors] == gpus
    found = [t.tolist() for t in tensors]
    tensors = [torch.full((1,), 10.0 * rank + j, device=gpu) for j, gpu in enumerate(gpus)]
    places = [[torch.zeros(1, device=gpu) for _ in range(4)] for gpu in gpus]
    dist.all_gather_multigpu(places, tensors)  # type: ignore[attr-defined]
    found += [[t.item() for t in outputs] for outputs in places]
    work = dist.broadcast_multigpu(tensors, 1, async_op=True, src_tensor=1)  # type: ignore[attr-defined]
    work.wait()
    return [*found, [t.item() for t in tensors]]


def test_every_device_of_every_rank_takes_part() -> None:
    """The sum is of four tensors, the gathered lists have four, on the devices that the tensors were on."""
    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2, data="real")
    gathered = [0.0, 1.0, 10.0, 11.0]
    assert outcome.results == [[[22.0, 22.0], [22.0, 22.0], gathered, gathered, [11.0, 11.0]]] * 2


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
