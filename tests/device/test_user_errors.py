"""A program's mistakes on simulated GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import distsim
from distsim.errors import NotSimulated


def made(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, device="cuda", dtype=dtype)


def indices(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.long, device="cuda")


def mask(*size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bool, device="cuda")


LARGE, BF16 = 8192, torch.bfloat16
"""Values of so many numbers are not kept: nothing runs on the host that would say it."""
MISTAKES: dict[str, Any] = {
    "product": lambda: made(2, 3) @ made(4, 5),
    "product of many": lambda: F.linear(made(2, 6, 3), made(5, 4), made(5)),
    "broadcast": lambda: made(2, 3) + made(4, 5),
    "where": lambda: torch.where(made(2) > 0, made(3), made(2)),
    "in place": lambda: made(3).add_(made(2, 3)),
    "bias": lambda: F.linear(made(2, 3), made(4, 3), made(5)),
    "conv channels": lambda: F.conv2d(made(2, 3, 8, 8), made(4, 5, 3, 3)),
    "conv stride": lambda: F.conv2d(made(2, 3, 8, 8), made(4, 3, 3, 3), stride=0),
    "conv dtype": lambda: F.conv2d(made(64, 3, 32, 32, dtype=BF16), made(4, 3, 3, 3)),
    "layer_norm shape": lambda: F.layer_norm(made(2, 6), (5,)),
    "layer_norm weight": lambda: F.layer_norm(made(2, 6), (6,), made(5)),
    "group_norm weight": lambda: F.group_norm(made(2, 6, 4), 3, made(5)),
    "batch_norm weight": lambda: F.batch_norm(made(64, 3, 64), made(3), made(3), made(5), training=True),
    "cat sizes": lambda: torch.cat([made(2, 3), made(2, 4)]),
    "cat dimensions": lambda: torch.cat([made(2, 3), made(2, 3, 1)]),
    "stack": lambda: torch.stack([made(2, 3), made(2, 4)]),
    "attention heads": lambda: F.scaled_dot_product_attention(made(2, 4, 8, 16), made(2, 4, 8, 32), made(2, 4, 8, 16)),
    "attention batch": lambda: F.scaled_dot_product_attention(made(2, 4, 8, 16), made(3, 4, 8, 16), made(3, 4, 8, 16)),
    "attention dtype": lambda: F.scaled_dot_product_attention(
        made(2, 4, 80, 64), made(2, 4, 80, 64, dtype=BF16), made(2, 4, 80, 64)
    ),
    "attention mask": lambda: F.scaled_dot_product_attention(*[made(2, 4, 80, 64)] * 3, attn_mask=indices(80, 80)),
    "embedding of numbers": lambda: F.embedding(made(3), made(10, 4)),
    "embedding of bf16": lambda: F.embedding(made(LARGE, dtype=BF16), made(10, 4)),
    "embedding weight": lambda: F.embedding(indices(3), made(10)),
    "product dtype": lambda: made(128, 128) @ made(128, 128, dtype=BF16),
    "linear dtype": lambda: F.linear(made(128, 128, dtype=BF16), made(128, 128), made(128)),
    "target dtype": lambda: F.cross_entropy(made(LARGE, 10), indices(LARGE).int()),
    "softmax": lambda: made(2, 3).softmax(2),
    "mask": lambda: made(3, 4)[mask(4)],
    "mask on the left": lambda: made(3, 4).__setitem__(mask(4), made(4)),
    "masked_select": lambda: made(3, 4).masked_select(mask(3)),
    "topk": lambda: made(3).topk(5),
}


def test_arguments_that_do_not_fit_are_refused() -> None:
    """Shapes and data types, with errors of the types that the CPU's kernels raise, and a sentence."""

    def body() -> dict[str, bool]:
        refused = {}
        for name, call in MISTAKES.items():
            with pytest.raises((RuntimeError, IndexError)) as caught:
                call()
            refused[name] = bool(str(caught.value)) and not isinstance(caught.value, NotSimulated)
        return refused

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1)
    assert outcome.results == [dict.fromkeys(MISTAKES, True)]


def test_mixed_precision_runs_where_torch_allows_it() -> None:
    """Autocast, and norms with parameters of float32 for bfloat16, are no mistake."""

    def body() -> str:
        x, net = made(64, 128), torch.nn.Linear(128, 128, device="cuda")
        with torch.autocast("cuda", BF16):
            net(x).relu().sum().backward()
        F.batch_norm(made(64, 3, 64, dtype=BF16), made(3), made(3), made(3), made(3), training=True)
        F.layer_norm(made(2000, 60, dtype=BF16), (60,), made(60), made(60))
        return "ran"

    assert distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1).results == ["ran"]


def test_the_heading_names_the_backend_of_each_device() -> None:
    """A program on GPUs with gloo for the host and NCCL for GPUs is not said to run on gloo."""

    def body(device: str) -> None:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
        if device == "cuda":
            torch.cuda.set_device(torch.distributed.get_rank())
        torch.distributed.all_reduce(torch.ones(2, device=device))

    backends = [distsim.simulate(body, nproc_per_node=2, args=(device,)).backend for device in ("cuda", "cpu")]
    assert backends == ["cpu:gloo,cuda:nccl", "gloo"]
