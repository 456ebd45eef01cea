"""Matrix products: what tiles, waves, data types and operands do to their time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from distsim.kernels import Cost, Gpu
from tests.kernels.shapes import meta, priced

aten = torch.ops.aten


def mm(gpu: Gpu, m: int, n: int, k: int, dtype: Any = torch.bfloat16) -> Cost:
    return priced(gpu, aten.mm.default, meta(m, k, dtype=dtype), meta(k, n, dtype=dtype))


@pytest.fixture
def h100() -> Gpu:
    return Gpu.named("h100")


def test_flops_are_torchs(h100: Gpu) -> None:
    """2 m n k, as torch's own formula says, also of batches and of a bias."""
    from torch.utils.flop_counter import flop_registry

    assert mm(h100, 100, 200, 300).flops == flop_registry[aten.mm](
        meta(100, 300), meta(300, 200), out_val=meta(100, 200)
    )
    assert priced(h100, aten.bmm.default, meta(5, 6, 7), meta(5, 7, 8)).flops == 2 * 5 * 6 * 7 * 8
    assert priced(h100, aten.addmm.default, meta(8), meta(6, 7), meta(7, 8)).flops == 2 * 6 * 7 * 8


@pytest.mark.parametrize("way", ["allow_tf32", "set_float32_matmul_precision", "fp32_precision"])
def test_fp32_is_slow_until_tf32_is_allowed(h100: Gpu, way: str) -> None:
    """In each of torch's ways, which are read at the call."""
    matmul = torch.backends.cuda.matmul
    slow = mm(h100, 4096, 4096, 4096, torch.float32).seconds
    before = matmul.fp32_precision
    try:
        if way == "set_float32_matmul_precision":
            torch.set_float32_matmul_precision("high")
        else:
            setattr(matmul, way, {"allow_tf32": True, "fp32_precision": "tf32"}[way])
        allowed = mm(h100, 4096, 4096, 4096, torch.float32).seconds
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before
    half = mm(h100, 4096, 4096, 4096).seconds
    assert mm(h100, 4096, 4096, 4096, torch.float32).seconds == slow > 5 * allowed > 5 * half


def test_fp8_beats_bf16(h100: Gpu) -> None:
    """_scaled_mm goes by fp8's rate."""
    a, b = meta(8192, 8192, dtype=torch.float8_e4m3fn), meta(8192, 8192, dtype=torch.float8_e4m3fn)
    one = meta(1, dtype=torch.float32)
    out = meta(8192, 8192)
    cost = h100.cost(aten._scaled_mm.default, (a, b.t(), one, one), {"out_dtype": torch.bfloat16}, out)
    assert 1.5 < mm(h100, 8192, 8192, 8192).seconds / cost.seconds < 2.2


def scaled_mm(gpu: Gpu, dtype: torch.dtype, scales: torch.dtype, *, public: bool = False) -> Cost:
    """A product of two operands of 8,192 x 8,192 elements, by the operator of torch._scaled_mm or of F.scaled_mm."""
    a, b, one = meta(8192, 8192, dtype=dtype), meta(8192, 8192, dtype=dtype).t(), meta(1, dtype=scales)
    if public:
        args = (a, b, [one], [0], [0], [one], [0], [0], None, torch.bfloat16)
        return gpu.cost(aten._scaled_mm_v2.default, args, {}, meta(8192, 8192))
    return gpu.cost(aten._scaled_mm.default, (a, b, one, one), {}, meta(8192, 8192))


def test_the_public_product_in_eight_bits_costs_as_the_private_one(h100: Gpu) -> None:
    """F.scaled_mm is an operator of its own, and the same kernel."""
    fp8 = (torch.float8_e4m3fn, torch.float32)
    assert scaled_mm(h100, *fp8, public=True) == scaled_mm(h100, *fp8)


def test_an_element_of_four_bits_holds_two_numbers() -> None:
    """Twice the operations of 8-bit operands of as many bytes, at twice the rate."""
    b200 = Gpu.named("b200")
    four = scaled_mm(b200, torch.float4_e2m1fn_x2, torch.float8_e4m3fn)
    eight = scaled_mm(b200, torch.float8_e4m3fn, torch.float32)
    assert four.flops == 2 * eight.flops
    assert four.seconds == pytest.approx(eight.seconds, rel=0.1)


@pytest.mark.parametrize(
    ("gpu", "dtype", "scales", "lacks"),
    [
        ("a100", torch.float8_e4m3fn, torch.float32, "fp8"),
        ("a100", torch.float4_e2m1fn_x2, torch.float8_e4m3fn, "fp4"),
        ("h100", torch.float4_e2m1fn_x2, torch.float8_e4m3fn, "fp4"),
        ("h100", torch.float8_e4m3fn, torch.float8_e8m0fnu, "fp4"),
    ],
)
def test_a_format_that_a_gpu_has_not_is_refused(gpu: str, dtype: torch.dtype, scales: torch.dtype, lacks: str) -> None:
    """One line with the formats that it has: nothing is borrowed for one it lacks."""
    with pytest.raises(NotImplementedError, match=f"^_scaled_mm of .*: expected a GPU with {lacks} products, got "):
        scaled_mm(Gpu.named(gpu), dtype, scales)


def test_a_convolution_is_its_product(h100: Gpu) -> None:
    """Flops of convolution and of its gradients are torch's; a 1 x 1 one takes as long as the product, or longer."""
    from torch.utils.flop_counter import conv_flop_count

    image, filters = meta(32, 256, 28, 28), meta(512, 256, 3, 3)
    args = (image, filters, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    forward = priced(h100, aten.convolution.default, *args)
    assert forward.flops == conv_flop_count(image.shape, filters.shape, [32, 512, 28, 28])
    gradient = meta(32, 512, 28, 28)
    rest = ([512], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    backward = h100.cost(aten.convolution_backward.default, (gradient, image, filters, *rest), {}, (image, filters))
    assert backward.flops == 2 * forward.flops
    assert forward.kind == backward.kind == "conv"
    assert forward.seconds >= mm(h100, 32 * 28 * 28, 512, 256 * 9).seconds


def test_grouped_products_are_slower_than_one(h100: Gpu) -> None:
    """Forty experts of 616 rows: more waves, and less in each."""
    rows, experts = 40 * 616, 40
    offsets = meta(experts, dtype=torch.int32)
    args = (meta(rows, 5120), meta(experts, 5120, 3072), offsets)
    cost = h100.cost(aten._grouped_mm.default, args, {}, meta(rows, 3072))
    assert cost.flops == pytest.approx(2 * rows * 5120 * 3072, rel=0.01)
    assert 1.05 < cost.seconds / mm(h100, rows, 3072, 5120).seconds < 2


def test_a_price_takes_less_than_a_millisecond(h100: Gpu) -> None:
    """The dispatcher asks once for each shape; processor time, so that a busy machine does not fail it."""
    mm(h100, 4096, 14336, 4096)
    begin = time.thread_time()
    for extra in range(20):
        mm(h100, 4096, 14336 + extra, 4096)
    assert (time.thread_time() - begin) / 20 < 5e-3
