"""A group of two backends, cpu:gloo,cuda:nccl: the calls of each meet by themselves, as in torch."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsim
from distsim.debug.records.kinds import Kind


def _simulate(body: Any, nproc: int = 2) -> Any:
    return distsim.simulate(body, on="dgx-h100:1", nproc_per_node=nproc)


def test_ranks_may_take_them_in_different_order() -> None:
    """One rank goes to the host first, the other to its GPU: neither waits for ever, nor is accused."""

    def body() -> Any:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        rank = dist.get_rank()
        here, there = torch.full((4,), float(rank)), torch.full((4,), float(rank), device=f"cuda:{rank}")
        for tensor in (here, there) if rank else (there, here):
            dist.all_reduce(tensor)
        return here.tolist(), there.tolist()

    outcome = _simulate(body)
    assert outcome.results == [([1.0] * 4, [1.0] * 4)] * 2
    assert not outcome.diagnoses


def test_a_thread_may_use_one_while_another_uses_the_other() -> None:
    """What dcp.async_save does: it gathers its plans on the host while the main thread trains."""

    def body() -> Any:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        rank = dist.get_rank()
        seen: list[Any] = [None] * dist.get_world_size()

        def gather() -> None:
            for _ in range(20):
                dist.all_gather_object(seen, rank)

        thread = threading.Thread(target=gather)
        thread.start()
        there = torch.ones(1 << 20, device=f"cuda:{rank}")
        for _ in range(20 + 10 * rank):  # the other rank's thread comes at other moments
            there.mul_(1.0)
        for _ in range(20):
            dist.all_reduce(there)
            torch.cuda.synchronize()
        thread.join()
        return seen

    outcome = _simulate(body)
    assert outcome.results == [[0, 1]] * 2
    assert not outcome.diagnoses


def test_one_of_them_from_two_threads_is_told() -> None:
    """And which of the two it was."""

    def body() -> None:
        dist.init_process_group("cpu:gloo,cuda:nccl")

        def beside() -> None:
            time.sleep(0.001)  # the other thread is in all_reduce by then
            dist.barrier()

        thread = threading.Thread(target=beside)
        if dist.get_rank():
            time.sleep(1.0)
        thread.start()
        dist.all_reduce(torch.ones(4))
        thread.join()

    (told,) = _simulate(body).diagnoses
    assert told.kind is Kind.THREAD_RACE
    assert told.group.label == "default_pg (cpu)"


def test_messages_between_gpus_take_nccls_time() -> None:
    """Whatever the other backend is."""

    def body(backend: str) -> float:
        dist.init_process_group(backend)
        rank = dist.get_rank()
        there = torch.empty(64 << 20, dtype=torch.uint8, device=f"cuda:{rank}")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        (dist.recv if rank else dist.send)(there, 1 - rank)
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))

    both, alone = (_simulate(lambda b=b: body(b)).results for b in ("cpu:gloo,cuda:nccl", "nccl"))
    assert both == pytest.approx(alone, rel=0.01)


def all_reduced(t: torch.Tensor) -> None:
    dist.all_reduce(t)
    torch.cuda.synchronize()


def broadcast(t: torch.Tensor) -> None:
    dist.broadcast(t, 0)


def gathered(t: torch.Tensor) -> None:
    dist.all_gather([torch.empty_like(t) for _ in range(3)], t)
    dist.all_reduce(torch.ones(4, device="cuda"))
    dist.barrier()


@pytest.mark.parametrize("call", [all_reduced, broadcast, gathered])
def test_a_tensor_on_the_cpu_of_one_rank_is_told(call: Any) -> None:
    """As one mismatch of that rank, its line and `.to(device)`: its call meets those of no other rank."""

    def body() -> None:
        rank = int(os.environ["RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        call(torch.ones(4, device="cpu" if rank == 1 else "cuda"))

    (told,) = _simulate(body, 3).diagnoses
    assert (told.kind, told.culprits, told.victims, told.exit_code) == (Kind.DEVICE_MISMATCH, (1,), (0, 2), 4)
    assert "with a tensor on the CPU" in told.explanation
    assert ".to(device)" in told.suggestion
    line = call.__code__.co_firstlineno + 1
    assert told.sites[1].line == line


@pytest.mark.parametrize("sender", [0, 1])
def test_the_ends_of_a_message_on_unlike_devices(sender: int) -> None:
    """Not as two groups of the program."""

    def body() -> None:
        rank = int(os.environ["RANK"])
        dist.init_process_group("cpu:gloo,cuda:nccl")
        t = torch.ones(4, device="cuda:1" if rank else "cpu")
        (dist.send if rank == sender else dist.recv)(t, 1 - rank)
        torch.cuda.synchronize()

    (told,) = _simulate(body).diagnoses
    assert told.kind is Kind.P2P_UNMATCHED
    assert ("with a tensor on a GPU, not on the CPU" if sender else "on the CPU, not on a GPU") in told.explanation
    assert told.suggestion.startswith("Move the tensor of one end")


def test_the_default_backend_is_nccl() -> None:
    """As in torch's `_new_process_group_helper`; each device's backend has its own name."""

    def body() -> tuple[str, ...]:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        group = dist.distributed_c10d._get_default_group()
        devices = [torch.device(name) for name in ("cpu", "cuda")]
        return group.name(), *(group._get_backend(device).name() for device in devices)

    assert _simulate(body, 1).results == [("nccl", "gloo", "nccl")]


def test_a_group_is_split_by_its_own_ranks() -> None:
    """As NCCL splits a communicator: a rank in no part gets None, and parts are named after their parent."""

    def body() -> Any:
        rank = int(os.environ["RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        parent = dist.new_group([3, 2, 1], group_desc="late") if rank else dist.new_group([1, 2, 3])
        if not rank:
            return None
        part = dist.split_group(parent, [[0, 2]])
        with pytest.raises(ValueError, match="duplicate ranks"):
            dist.split_group(parent, [[0, 0]])
        if part in (None, dist.GroupMember.NON_GROUP_MEMBER):  # up to torch 2.13, and since then
            return "none"
        total = torch.full((1,), float(rank), device="cuda")
        dist.all_reduce(total, group=part)
        return dist.get_process_group_ranks(part), part.group_desc, total.item()

    results = _simulate(body, 4).results
    assert results == [None, ([1, 3], "late:split:0", 4.0), "none", ([1, 3], "late:split:0", 4.0)]
