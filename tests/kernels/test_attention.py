"""Fused attention: masks, directions, lengths, dimensions, implementations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distsim.kernels import Cost, Gpu
from tests.kernels.shapes import meta

aten = torch.ops.aten


def flash(
    gpu: Gpu, batch: int, heads: int, length: int, dim: int = 128, *, causal: bool = False, kind: str = "flash"
) -> Cost:
    query = meta(batch, heads, length, dim)
    stats = meta(batch, heads, length, dtype=torch.float32)
    if kind == "flash":
        args: tuple[Any, ...] = (query, query, query, 0.0, causal)
        return gpu.cost(aten._scaled_dot_product_flash_attention.default, args, {}, (query, stats))
    args = (query, query, query, None, True, 0.0, causal)
    return gpu.cost(aten._scaled_dot_product_cudnn_attention.default, args, {}, (query, stats))


def flash_backward(gpu: Gpu, batch: int, heads: int, length: int, dim: int = 128, *, causal: bool = False) -> Cost:
    query = meta(batch, heads, length, dim)
    stats, seed = meta(batch, heads, length, dtype=torch.float32), meta(2, dtype=torch.int64)
    args = (query, query, query, query, query, stats, None, None, length, length, 0.0, causal, seed, seed)
    return gpu.cost(aten._scaled_dot_product_flash_attention_backward.default, args, {}, (query,) * 3)


@pytest.fixture
def h100() -> Gpu:
    return Gpu.named("h100")


def test_flops_are_torchs_without_a_mask(h100: Gpu) -> None:
    """Two products forward, five backward."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    shape = (2, 16, 4096, 128)
    assert flash(h100, 2, 16, 4096).flops == sdpa_flop_count(shape, shape, shape)
    assert flash_backward(h100, 2, 16, 4096).flops == sdpa_backward_flop_count(shape, shape, shape, shape)


def test_backward_has_two_and_a_half_times_the_flops_at_a_lower_rate(h100: Gpu) -> None:
    """FlashAttention's own count."""
    forward, backward = flash(h100, 4, 16, 4096), flash_backward(h100, 4, 16, 4096)
    assert backward.flops == forward.flops * 5 // 2
    assert backward.flops / backward.seconds < forward.flops / forward.seconds
    assert backward.kernels == 3


def test_cudnn_beats_flash_on_hopper_and_not_before(h100: Gpu) -> None:
    """PyTorch's flash attention knows nothing of Hopper; `sdpa_kernel` says what PyTorch takes."""
    assert flash(h100, 4, 16, 4096, kind="cudnn").seconds < 0.7 * flash(h100, 4, 16, 4096).seconds
    a100 = Gpu.named("a100-80gb")
    assert flash(a100, 4, 16, 4096, kind="cudnn").seconds >= flash(a100, 4, 16, 4096).seconds
    assert (h100.sdpa_kernel, a100.sdpa_kernel) == ("cudnn", "flash")


def test_packed_sequences_are_shared_out(h100: Gpu) -> None:
    """flash_attn_varlen's shapes: 8 sequences of 1,024 tokens cost what a batch of 8 does."""
    packed, starts = meta(8 * 1024, 16, 128), meta(9, dtype=torch.int32)
    args = (packed, packed, packed, starts, starts, 1024, 1024, 0.0, True, False)
    cost = h100.cost(aten._flash_attention_forward.default, args, {}, (packed,))
    assert cost.flops == flash(h100, 8, 16, 1024, causal=True).flops
    assert cost.seconds == pytest.approx(flash(h100, 8, 16, 1024, causal=True).seconds, rel=0.02)
