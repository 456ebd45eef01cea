"""Pure rules of prices, each a table of small cases: alignment, strides, lists of tensors, kernels of libraries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distsim.kernels import Cost, Gpu
from distsim.kernels.cost import OperatorCall
from distsim.kernels.gpu import fused_cost
from distsim.kernels.pricing import Attention, Gemm, Pricing, attention_seconds
from distsim.kernels.rules import memory_bound
from distsim.kernels.rules.compute_bound import _alignment, _library_kernel
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


@pytest.mark.parametrize(("left", "right", "dtype", "rate", "reason"), ALIGNED)
def test_rows_that_are_not_aligned(
    left: tuple[int, ...], right: tuple[int, ...], dtype: dict[str, Any], rate: float, reason: str
) -> None:
    """To 16 bytes, in products that are large in all three dimensions."""
    one, other = meta(*left, **dtype), meta(*right, **dtype)
    gemm = Gemm(left[-2], right[-1], left[-1])
    assert _alignment(PRICING, gemm, one, other, right[-1]) == rate, reason


def test_the_pitch_of_a_batch_is_not_that_of_its_rows() -> None:
    """Products may begin anywhere; a transposed operand has the pitch of its columns."""
    batch = torch.empty_strided((3, 512, 512), (512 * 512 + 2, 512, 1), dtype=torch.bfloat16, device="meta")
    gemm = Gemm(512, 512, 512, 3)
    assert _alignment(PRICING, gemm, batch, batch, 512) == 1.0
    assert _alignment(PRICING, Gemm(512, 512, 514), meta(514, 512).t(), meta(514, 512), 512) == 1.0


FASTEST = [
    ((4, 5), (5, 1), 1, "the last dimension"),
    ((4, 5), (1, 4), 0, "of a transposed tensor the first"),
    ((4, 1), (1, 1), 0, "a dimension of one element does not count"),
    ((4, 5), (1, 0), 0, "nor one that is expanded"),
    ((4, 5), (1, 1), 1, "of two alike the last"),
    ((1, 1), (1, 1), 1, "without any, the last"),
]


@pytest.mark.parametrize(("size", "stride", "fastest", "reason"), FASTEST)
def test_the_fastest_dimension(size: Any, stride: Any, fastest: int, reason: str) -> None:
    """By strides."""
    assert memory_bound._fastest(torch.empty_strided(size, stride, device="meta")) == fastest, reason


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
    fields = {"read": read, "written": written, "flops": flops, "kind": "gemm", "kernels": kernels, "dtype": ""}
    cost = _library_kernel(PRICING, {**fields, "gemm": list(shape)})  # type: ignore[arg-type]
    moved = 3 * 2 * 64 * 64
    if shape:
        rate = spec.gemm.grouped if shape[3] > 1 else 1.0
        assert cost == PRICING.gemm(Gemm(*shape, "bf16", moved), rate=rate), reason
        return
    fixed_s = kernels * spec.memory.floor + (kernels - 1) * spec.host.gap
    bytes_s = moved / (spec.chip.memory_bandwidth * spec.memory.elementwise)
    math_s = flops / (spec.chip.peak("bf16") * spec.gemm.sustained("bf16"))
    assert cost.seconds == pytest.approx(fixed_s + max(bytes_s, math_s)), reason
    assert (cost.kernels, cost.flops, cost.nbytes, cost.memory_bound) == (kernels, flops, moved, bytes_s >= math_s)


@pytest.mark.parametrize(
    ("read", "written", "is_same"), [(60, 40, True), (60, 39, False), (100, 0, True), (61, 40, True)]
)
def test_a_part_by_itself_stays_what_it_is(read: int, written: int, is_same: bool) -> None:
    """Unless a fused kernel moves less."""
    part = Cost(1e-3, 1, 0, 100, "elementwise", True)
    assert (fused_cost(GPU, [part], read, written) is part) is is_same


def test_attention_goes_by_blocks_of_keys() -> None:
    """128 keys are one block, 129 two."""
    kernel: Any = SimpleNamespace(**{**vars(GPU.spec.attention.flash), "overhead": 0.0, "tail": 0.0})
    seconds = [attention_seconds(kernel, GPU.spec.chip, Attention(132, 1, 128, keys, 128, 128)) for keys in (128, 129)]
    assert seconds[1] == pytest.approx(2 * seconds[0])
    assert seconds[0] == pytest.approx(132 * 2 * 128 * 128 * 256 / kernel.forward)
