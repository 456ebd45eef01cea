"""A program's mistakes on simulated GPUs, in the words that it gets on real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import distsim
from distsim.sim.device.operators.torch_words import in_torchs_words


def made(*size: int) -> torch.Tensor:
    return torch.empty(size, device="cuda")


def linear() -> Any:
    return torch.nn.functional.linear(made(2, 6, 3), made(5, 4), made(5))


PRODUCT = "mat1 and mat2 shapes cannot be multiplied"
MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: made(2, 3) @ made(4, 5), f"{PRODUCT} (2x3 and 4x5)"),
    (linear, f"{PRODUCT} (12x3 and 4x5)"),
    (
        lambda: made(2, 3) + made(4, 5),
        "The size of tensor a (3) must match the size of tensor b (5) at non-singleton dimension 1",
    ),
    (
        lambda: torch.where(made(2) > 0, made(3), made(2)),
        "The size of tensor a (2) must match the size of tensor b (3) at non-singleton dimension 0",
    ),
]


def test_shapes_that_do_not_fit_are_told_in_torchs_words() -> None:
    """Products and broadcasts: as the CUDA kernels say it, which is as on the CPU."""

    def body() -> list[str]:
        found = []
        for call, _ in MISTAKES:
            with pytest.raises(RuntimeError) as caught:
                call()
            found.append(str(caught.value))
        return found

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1)
    assert outcome.results == [[text for _, text in MISTAKES]]
    other = RuntimeError("Attempting to broadcast a dimension")
    assert in_torchs_words(other, ()) is other


def test_the_heading_names_the_backend_of_each_device() -> None:
    """A program on GPUs with gloo for the host and NCCL for GPUs is not said to run on gloo."""

    def body(device: str) -> None:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
        if device == "cuda":
            torch.cuda.set_device(torch.distributed.get_rank())
        torch.distributed.all_reduce(torch.ones(2, device=device))

    backends = [distsim.simulate(body, nproc_per_node=2, args=(device,)).backend for device in ("cuda", "cpu")]
    assert backends == ["cpu:gloo,cuda:nccl", "gloo"]
