"""Pure rules of prices, each a table of small cases: alignment, strides, lists of tensors, kernels of libraries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distsim.kernels import Cost, Gpu
from distsim.kernels.cost import OperatorCall, nbytes
from distsim.kernels.pricing import Attention, Gemm, Pricing, attention_seconds, math_dtype
from distsim.kernels.rules import memory_bound
from distsim.kernels.rules.compute_bound import TRITON_NORM_16_BITS, library_cost
from tests.kernels.shapes import meta

aten = torch.ops.aten
GPU = Gpu.named("h100")
PRICING = Pricing(GPU.spec)
SLOW = GPU.spec.gemm.unaligned

ALIGNED = [
    # shapes of the operands -> relative rate
    ((512, 512), (512, 512), {}, 1.0, "rows of 1,024 bytes"),
    ((512, 520), (520, 512), {}, 1.0, "a multiple of 8 elements of 2 bytes"),
    ((512, 514), (514, 512), {}, SLOW, "left rows of 1,028 bytes"),
    ((512, 512), (512, 516), {}, SLOW, "right rows and the result's"),
    ((512, 516), (516, 512), {"dtype": torch.float32}, 1.0, "elements of 4 bytes"),
    ((512, 513), (513, 512), {"dtype": torch.float64}, 1.0, "elements of 8 bytes have no such kernels"),
    ((255, 514), (514, 512), {}, 1.0, "few rows"),
    ((256, 514), (514, 512), {}, SLOW, "as many as count"),
    ((512, 254), (254, 512), {}, 1.0, "a short inner dimension"),
    ((512, 512), (512, 254), {}, 1.0, "few columns"),
    ((3, 512, 512), (3, 512, 512), {}, 1.0, "a batch"),
]


def product(one: Any, other: Any) -> Cost:
    return GPU.cost((aten.bmm if one.dim() == 3 else aten.mm).default, (one, other), {}, one @ other)


def at_rate(one: Any, other: Any, rate: float) -> Cost:
    """The cost of a product at a part of a product's rate."""
    batch = one.shape[0] if one.dim() == 3 else 1
    moved = nbytes([one, other, one @ other])
    gemm = Gemm(one.shape[-2], other.shape[-1], one.shape[-1], batch, math_dtype(one.dtype), moved)
    return PRICING.gemm(gemm, rate=rate)


@pytest.mark.parametrize(("left", "right", "dtype", "rate", "reason"), ALIGNED)
def test_rows_that_are_not_aligned(
    left: tuple[int, ...], right: tuple[int, ...], dtype: dict[str, Any], rate: float, reason: str
) -> None:
    """To 16 bytes, in products that are large in all three dimensions."""
    one, other = meta(*left, **dtype), meta(*right, **dtype)
    assert product(one, other) == at_rate(one, other, rate), reason


def test_the_pitch_of_a_batch_is_not_that_of_its_rows() -> None:
    """Products may begin anywhere; a transposed operand has the pitch of its columns."""
    batch = torch.empty_strided((3, 512, 512), (512 * 512 + 2, 512, 1), dtype=torch.bfloat16, device="meta")
    for one, other in ((batch, batch), (meta(514, 512).t(), meta(514, 512))):
        assert product(one, other) == at_rate(one, other, 1.0)


def foreach(tensors: list[Any]) -> Cost:
    """The cost of adding a number to each of *tensors*."""
    return memory_bound.foreach(PRICING, OperatorCall(aten._foreach_add_.Scalar, (tensors, 1), {}, None))


CHUNK = 65_536
LISTS = [
    # tensors, elements of each -> kernels, share of the optimizers' bandwidth
    (1, CHUNK, 1, 2 / 132, "one block has twice its multiprocessor's share"),
    (1, CHUNK + 1, 1, 4 / 132, "one element more is a second block"),
    (66, CHUNK, 1, 1.0, "half of the multiprocessors have all of it"),
    (65, CHUNK, 1, 130 / 132, "fewer have not"),
    (770, 8, 1, 1.0, "770 tensors in a launch"),
    (771, 8, 2, 1.0, "one more in a second"),
    (1, 2_240 * CHUNK, 1, 1.0, "2,240 blocks in a launch"),
    (1, 2_240 * CHUNK + 1, 2, 1.0, "one more in a second"),
]


@pytest.mark.parametrize(("count", "numel", "kernels", "share", "reason"), LISTS)
def test_a_list_of_tensors(count: int, numel: int, kernels: int, share: float, reason: str) -> None:
    """In blocks of 65,536 elements; each is read and written."""
    cost = foreach([meta(numel)] * count)
    moved = 2 * 2 * numel * count
    spec = GPU.spec
    seconds = moved / (spec.chip.memory_bandwidth * spec.memory.optimizer * share)
    seconds += kernels * spec.memory.floor + (kernels - 1) * spec.host.gap
    assert (cost.kernels, cost.nbytes, cost.seconds) == (kernels, moved, pytest.approx(seconds)), reason


LIBRARY = [
    # product, kernels, flops -> kind of answer
    ((64, 64, 64, 1), 1, 0, "a product at its own rate"),
    ((64, 64, 64, 2), 1, 0, "several as grouped products"),
    ((), 3, 0, "kernels one after the other, with gaps"),
    ((), 2, 10**13, "flops, where they take longer"),
]


@pytest.mark.parametrize(("shape", "kernels", "flops", "reason"), LIBRARY)
def test_a_kernel_of_a_library(shape: tuple[int, ...], kernels: int, flops: int, reason: str) -> None:
    """By the product that it says, or by its bytes and flops."""
    read, written, spec = [meta(64, 64), meta(64, 64)], [meta(64, 64)], GPU.spec
    moved = 3 * 2 * 64 * 64
    cost = library_cost(PRICING, "gemm", [*read, *written], moved, kernels=kernels, flops=flops, shape=shape)
    if shape:
        rate = spec.gemm.grouped if shape[3] > 1 else 1.0
        assert cost == PRICING.gemm(Gemm(*shape, "bf16", moved), rate=rate), reason
        return
    fixed_s = kernels * spec.memory.floor + (kernels - 1) * spec.host.gap
    bytes_s = moved / (spec.chip.memory_bandwidth * spec.memory.elementwise)
    math_s = flops / (spec.chip.peak("bf16") * spec.gemm.sustained("bf16"))
    assert cost.seconds == pytest.approx(fixed_s + max(bytes_s, math_s)), reason
    assert (cost.kernels, cost.flops, cost.nbytes, cost.memory_bound) == (kernels, flops, moved, bytes_s >= math_s)


@pytest.mark.parametrize(("dtype", "speed"), [(torch.bfloat16, TRITON_NORM_16_BITS), (torch.float32, 1.0)])
def test_tritons_norm_backward_takes_its_elements_time(dtype: torch.dtype, speed: float) -> None:
    """Which memory limits, so that a GPU of a slower clock is no slower."""
    given, grad, out = (torch.empty(4096, 1024, dtype=dtype, device="meta") for _ in range(3))
    cost = library_cost(PRICING, "norm backward", [given, grad, out], 3 * given.nbytes)
    elements_s = given.numel() / (GPU.spec.memory.norm_backward * speed)
    assert cost.seconds == pytest.approx(elements_s + 2 * GPU.spec.memory.floor)
    assert (cost.kind, cost.memory_bound) == ("norm", True)


def test_attention_goes_by_blocks_of_keys() -> None:
    """128 keys are one block, 129 two."""
    kernel: Any = SimpleNamespace(**{**vars(GPU.spec.attention.flash), "overhead": 0.0, "tail": 0.0})
    seconds = [attention_seconds(kernel, GPU.spec.chip, Attention(132, 1, 128, keys, 128, 128)) for keys in (128, 129)]
    assert seconds[1] == pytest.approx(2 * seconds[0])
    assert seconds[0] == pytest.approx(132 * 2 * 128 * 128 * 256 / kernel.forward)
