"""Attributes of a program that hide methods of tensors, such as Megatron's `bias.stride = 1`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsim

METHODS = ("stride", "size", "dim", "numel", "element_size", "is_contiguous", "detach")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_operators_and_collectives_do_not_read_them(device: str) -> None:
    """torch's C++ code sees the tensor, not the attributes of its Python object."""

    def body() -> Any:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            torch.cuda.set_device(dist.get_rank())
        weight = torch.nn.Parameter(torch.ones(4, 4, device=device))
        for name in METHODS:
            setattr(weight, name, 7)
        with torch.no_grad():
            weight.fill_(2.0)
            dist.all_reduce(weight)
        parts = [torch.empty(4, 4, device=device) for _ in range(2)]
        dist.all_gather(parts, weight)
        if dist.get_rank():
            dist.send(weight, 0)
        else:
            dist.recv(weight, 1)
        y = torch.nn.functional.linear(torch.ones(2, 4, device=device), weight)
        y.sum().backward()
        torch.optim.SGD([weight], 0.0).step()
        return parts[1].tolist(), y.tolist(), [getattr(weight, name) for name in METHODS]

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2)
    assert outcome.results == [([[4.0] * 4] * 4, [[16.0] * 4] * 2, [7] * len(METHODS))] * 2


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_one_of_several_outputs_may_have_them(device: str) -> None:
    """Whichever tensor of a call has such attributes, the call goes on with its methods."""

    def body() -> Any:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            torch.cuda.set_device(dist.get_rank())
        parts = [torch.empty(4, device=device) for _ in range(2)]
        for name in METHODS:
            setattr(parts[1], name, 7)
        dist.all_gather(parts, torch.ones(4, device=device), async_op=True).wait()
        return parts[1].tolist()

    assert distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2).results == [[1.0] * 4] * 2
