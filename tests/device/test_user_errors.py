"""A program's mistakes on simulated GPUs, in the words that it gets on real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import distsim
from distsim.sim.device.operators.plan import in_torchs_words


def made(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, device="cuda", dtype=dtype)


def indices(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.long, device="cuda")


def mask(*size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bool, device="cuda")


LARGE, BF16 = 8192, torch.bfloat16
"""Values of so many numbers are not kept: nothing runs on the host that would say it."""
PRODUCT = "mat1 and mat2 shapes cannot be multiplied"
MASK = "The shape of the mask [4] at index 0 does not match the shape of the indexed tensor [3, 4] at index 0"
SAME: tuple[tuple[str, Any, str], ...] = (
    ("product", lambda: made(2, 3) @ made(4, 5), f"{PRODUCT} (2x3 and 4x5)"),
    ("product of many", lambda: F.linear(made(2, 6, 3), made(5, 4), made(5)), f"{PRODUCT} (12x3 and 4x5)"),
    (
        "broadcast",
        lambda: made(2, 3) + made(4, 5),
        "The size of tensor a (3) must match the size of tensor b (5) at non-singleton dimension 1",
    ),
    (
        "where",
        lambda: torch.where(made(2) > 0, made(3), made(2)),
        "The size of tensor a (2) must match the size of tensor b (3) at non-singleton dimension 0",
    ),
    (
        "in place",
        lambda: made(3).add_(made(2, 3)),
        "output with shape [3] doesn't match the broadcast shape [2, 3]",
    ),
    (
        "bias",
        lambda: F.linear(made(2, 3), made(4, 3), made(5)),
        "The expanded size of the tensor (4) must match the existing size (5) at non-singleton dimension 1.  "
        "Target sizes: [2, 4].  Tensor sizes: [5]",
    ),
    (
        "conv channels",
        lambda: F.conv2d(made(2, 3, 8, 8), made(4, 5, 3, 3)),
        "Given groups=1, weight of size [4, 5, 3, 3], expected input[2, 3, 8, 8] to have 5 channels, but got 3 "
        "channels instead",
    ),
    (
        "conv stride",
        lambda: F.conv2d(made(2, 3, 8, 8), made(4, 3, 3, 3), stride=0),
        "non-positive stride is not supported",
    ),
    (
        "conv dtype",
        lambda: F.conv2d(made(64, 3, 32, 32, dtype=BF16), made(4, 3, 3, 3)),
        "Input type (CUDABFloat16Type) and weight type (torch.cuda.FloatTensor) should be the same",
    ),
    (
        "layer_norm shape",
        lambda: F.layer_norm(made(2, 6), (5,)),
        "Given normalized_shape=[5], expected input with shape [*, 5], but got input of size[2, 6]",
    ),
    (
        "layer_norm weight",
        lambda: F.layer_norm(made(2, 6), (6,), made(5)),
        "Expected weight to be of same shape as normalized_shape, but got weight of shape [5] and normalized_shape = "
        "[6]",
    ),
    (
        "group_norm weight",
        lambda: F.group_norm(made(2, 6, 4), 3, made(5)),
        "Expected weight to be a vector of size equal to the number of channels in input, but got weight of shape [5] "
        "and input of shape [2, 6, 4]",
    ),
    (
        "batch_norm weight",
        lambda: F.batch_norm(made(64, 3, 64), made(3), made(3), made(5), training=True),
        "weight should contain 3 elements not 5",
    ),
    (
        "cat sizes",
        lambda: torch.cat([made(2, 3), made(2, 4)]),
        "Sizes of tensors must match except in dimension 0. Expected size 3 but got size 4 for tensor number 1 in the "
        "list.",
    ),
    (
        "cat dimensions",
        lambda: torch.cat([made(2, 3), made(2, 3, 1)]),
        "Tensors must have same number of dimensions: got 2 and 3",
    ),
    (
        "stack",
        lambda: torch.stack([made(2, 3), made(2, 4)]),
        "stack expects each tensor to be equal size, but got [2, 3] at entry 0 and [2, 4] at entry 1",
    ),
    (
        "attention heads",
        lambda: F.scaled_dot_product_attention(made(2, 4, 8, 16), made(2, 4, 8, 32), made(2, 4, 8, 16)),
        "Expected size for first two dimensions of batch2 tensor to be: [8, 16] but got: [8, 32].",
    ),
    (
        "attention batch",
        lambda: F.scaled_dot_product_attention(made(2, 4, 8, 16), made(3, 4, 8, 16), made(3, 4, 8, 16)),
        "The size of tensor a (2) must match the size of tensor b (3) at non-singleton dimension 0",
    ),
    (
        "attention dtype",
        lambda: F.scaled_dot_product_attention(made(2, 4, 80, 64), made(2, 4, 80, 64, dtype=BF16), made(2, 4, 80, 64)),
        "Expected query, key, and value to have the same dtype, but got query.dtype: float key.dtype: c10::BFloat16 "
        "and value.dtype: float instead.",
    ),
    (
        "attention mask",
        lambda: F.scaled_dot_product_attention(*[made(2, 4, 80, 64)] * 3, attn_mask=indices(80, 80)),
        "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: long int and  "
        "query.dtype: float instead.",
    ),
    (
        "embedding of numbers",
        lambda: F.embedding(made(3), made(10, 4)),
        "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but got "
        "torch.cuda.FloatTensor instead (while checking arguments for embedding)",
    ),
    (
        "embedding of bf16",
        lambda: F.embedding(made(LARGE, dtype=BF16), made(10, 4)),
        "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but got "
        "CUDABFloat16Type instead (while checking arguments for embedding)",
    ),
    ("embedding weight", lambda: F.embedding(indices(3), made(10)), "'weight' must be 2-D"),
    (
        "product dtype",
        lambda: made(128, 128) @ made(128, 128, dtype=BF16),
        "expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16",
    ),
    (
        "linear dtype",
        lambda: F.linear(made(128, 128, dtype=BF16), made(128, 128), made(128)),
        "mat1 and mat2 must have the same dtype, but got BFloat16 and Float",
    ),
    (
        "target dtype",
        lambda: F.cross_entropy(made(LARGE, 10), indices(LARGE).int()),
        "\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'",
    ),
    (
        "softmax",
        lambda: made(2, 3).softmax(2),
        "Dimension out of range (expected to be in range of [-2, 1], but got 2)",
    ),
    ("mask", lambda: made(3, 4)[mask(4)], MASK),
    ("mask on the left", lambda: made(3, 4).__setitem__(mask(4), made(4)), MASK),
    (
        "masked_select",
        lambda: made(3, 4).masked_select(mask(3)),
        "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1",
    ),
    ("topk", lambda: made(3).topk(5), "selected index k out of range"),
)


def test_arguments_that_do_not_fit_are_told_in_torchs_words() -> None:
    """Shapes and data types: as CUDA's kernels say it, which mostly is as the CPU's do."""

    # The texts are those of the CPU's kernels, with what the sources of CUDA's say otherwise: no GPU was asked.
    def body() -> dict[str, str]:
        found = {}
        for name, call, _ in SAME:
            with pytest.raises((RuntimeError, IndexError)) as caught:
                call()
            found[name] = str(caught.value)
        return found

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1)
    assert outcome.results == [{name: text for name, _, text in SAME}]


def test_kernels_of_others_and_large_tensors_are_not_run_to_hear_an_error() -> None:
    """A custom operator's own error stays; so does a meta kernel's where the CPU has no room, without torch.Size."""
    error = RuntimeError("size torch.Size([2, 3])")

    class Custom:
        namespace = "mine"

        def __call__(self, *args: Any) -> None:
            raise AssertionError("it was run")

    assert in_torchs_words(error, Custom(), (), {}) is error
    large = torch.empty(1 << 62, device="meta", dtype=torch.uint8)
    assert str(in_torchs_words(error, torch.ops.aten.relu.default, (large,), {})) == "size [2, 3]"


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
