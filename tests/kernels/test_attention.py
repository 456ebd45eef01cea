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


def test_a_causal_mask_halves(h100: Gpu) -> None:
    """Flops, and of a long sequence nearly the time; a short one pays for its diagonal."""
    full, causal = flash(h100, 1, 16, 16_384), flash(h100, 1, 16, 16_384, causal=True)
    assert causal.flops == pytest.approx(full.flops / 2, rel=1e-3)
    assert 0.5 <= causal.seconds / full.seconds < 0.6
    short = flash(h100, 32, 16, 512, causal=True).seconds / flash(h100, 32, 16, 512).seconds
    assert short > 0.65


def test_backward_has_two_and_a_half_times_the_flops_at_a_lower_rate(h100: Gpu) -> None:
    """FlashAttention's own count."""
    forward, backward = flash(h100, 4, 16, 4096), flash_backward(h100, 4, 16, 4096)
    assert backward.flops == forward.flops * 5 // 2
    assert backward.flops / backward.seconds < forward.flops / forward.seconds
    assert backward.kernels == 3


def test_the_rate_rises_with_the_length(h100: Gpu) -> None:
    """At the same number of tokens."""
    rates = [
        cost.flops / cost.seconds for cost in (flash(h100, 32 // times, 16, 512 * times) for times in (1, 2, 4, 32))
    ]
    assert rates == sorted(rates)


def test_few_heads_leave_multiprocessors_idle(h100: Gpu) -> None:
    """One head of 1,024 queries is eight blocks: as long as ten heads together."""
    assert flash(h100, 1, 1, 1024).seconds == pytest.approx(flash(h100, 1, 10, 1024).seconds, rel=0.15)
    assert flash(h100, 1, 100, 1024).seconds > 3 * flash(h100, 1, 1, 1024).seconds


def test_cudnn_beats_flash_on_hopper_and_not_before(h100: Gpu) -> None:
    """PyTorch's flash attention knows nothing of Hopper; `sdpa_kernel` says what PyTorch takes."""
    assert flash(h100, 4, 16, 4096, kind="cudnn").seconds < 0.7 * flash(h100, 4, 16, 4096).seconds
    a100 = Gpu.named("a100-80gb")
    assert flash(a100, 4, 16, 4096, kind="cudnn").seconds >= flash(a100, 4, 16, 4096).seconds
    assert (h100.sdpa_kernel, a100.sdpa_kernel) == ("cudnn", "flash")


def test_grouped_queries_count_as_heads(h100: Gpu) -> None:
    """Keys of eight heads for queries of thirty-two: the flops of thirty-two."""
    query, key = meta(1, 32, 4096, 128), meta(1, 8, 4096, 128)
    stats = meta(1, 32, 4096, dtype=torch.float32)
    args = (query, key, key, 0.0, True)
    cost = h100.cost(aten._scaled_dot_product_flash_attention.default, args, {}, (query, stats))
    assert cost.flops == flash(h100, 1, 32, 4096, causal=True).flops


def test_packed_sequences_are_shared_out(h100: Gpu) -> None:
    """flash_attn_varlen's shapes: 8 sequences of 1,024 tokens cost what a batch of 8 does."""
    packed, starts = meta(8 * 1024, 16, 128), meta(9, dtype=torch.int32)
    args = (packed, packed, packed, starts, starts, 1024, 1024, 0.0, True, False)
    cost = h100.cost(aten._flash_attention_forward.default, args, {}, (packed,))
    assert cost.flops == flash(h100, 8, 16, 1024, causal=True).flops
    assert cost.seconds == pytest.approx(flash(h100, 8, 16, 1024, causal=True).seconds, rel=0.02)


def test_32_bits_take_the_efficient_kernel_at_its_own_rate(h100: Gpu) -> None:
    """Twice the bytes, and far from half the rate."""

    def seconds(dtype: Any) -> float:
        query = meta(2, 16, 2048, 64, dtype=dtype)
        args = (query, query, query, None, True)
        stats = meta(2, 16, 2048, dtype=torch.float32)
        return h100.cost(aten._scaled_dot_product_efficient_attention.default, args, {}, (query, stats)).seconds

    assert seconds(torch.float32) > 2 * seconds(torch.bfloat16)
