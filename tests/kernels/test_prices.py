"""Prices by hand: a GPU of round figures, whose every product, block and copy can be worked out on paper."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distsim.kernels import Cost, Gpu
from distsim.kernels.cost import OperatorCall, nbytes
from distsim.kernels.gpu import fused_cost
from distsim.kernels.gpu_file import AttentionKernel, ChipSpec, EfficientKernel, GemmSpec, GpuFile, read_gpu
from distsim.kernels.pricing import RULES, Attention, Gemm, Pricing, attention_seconds, gemm_seconds, math_dtype
from distsim.kernels.rules.memory_bound import is_transposed
from tests.kernels.shapes import meta

aten, F32, I64 = torch.ops.aten, torch.float32, torch.int64
CHIP = ChipSpec.model_construct(
    compute_capability=0,
    multiprocessors=4,
    memory=1,
    memory_bandwidth=1e6,
    l2=1,
    flops={"bf16": 4 * 2.0 * 256 * 128 * 64, "fp32": 1.0},
)
"""A tile of 256 x 128 goes through 64 of k in a second on each of four multiprocessors."""
GEMM: dict[str, Any] = {
    "plateau": {"bf16": 0.5}, "mma": 1.0, "tiles": {"256x128": 1.0, "64x64": 0.125}, "tile_overhead": 0.25,
    "split_k": False, "memory": 0.5, "sharpness": 1, "floor": 1.0, "conv": 1.0, "grouped": 1.0,
}  # fmt: skip
"""Where sharpness is 1, tiles, plateau and memory are added up."""


def gemm(m: int, n: int, k: int, batch: int = 1, nbytes: int = 0, **fields: Any) -> tuple[float, int, bool]:
    """Seconds without the kernel's floor and the plateau's share, kernels, whether memory limits it."""
    product = Gemm(m, n, k, batch, "bf16", nbytes)
    seconds, kernels, by_memory = gemm_seconds(GemmSpec.model_construct(**GEMM | fields), CHIP, product)
    return seconds - 1.0 - product.flops / (0.5 * CHIP.flops["bf16"]), kernels, by_memory


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        ((256, 128, 64), 1.25), ((256, 128, 65), 2.25), ((128, 256, 64), 1.25), ((256 * 4, 128, 64), 1.25),
        ((256 * 4 + 1, 128, 64), 2.5), ((256 * 4, 128, 64, 2), 2.5), ((256, 128, 64, 5), 2.5),
        ((64, 64, 64), 1 + 1 / 32), ((64, 64, 128), 2 + 1 / 32), ((64, 64 * 2, 64), 1 + 1 / 32),
    ],
)  # fmt: skip
def test_tiles_go_in_waves_of_as_many_as_there_are_multiprocessors(shape: tuple[int, ...], seconds: float) -> None:
    """Each through its steps of k, and a begin and an end by its size; the quickest tile is taken."""
    assert gemm(*shape)[0] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("shape", "steps", "parts"),
    [
        ((256, 128, 1023), 16, 1),  # halves of k would be shorter than 512
        ((256, 128, 1024), 8, 2),
        ((256, 128, 2048), 8, 4),
        ((256 * 2, 128, 2048), 16, 2),  # four parts would need a second wave
        ((256 * 4, 128, 2048), 32, 1),  # the grid fills the device
    ],
)
def test_a_small_grid_is_split_along_k(shape: tuple[int, int, int], steps: int, parts: int) -> None:
    """A second kernel adds up what is written and read in 32 bits, and takes half of a floor."""
    seconds, kernels, _ = gemm(*shape, split_k=True, tiles={"256x128": 1.0}, memory=1.0)
    sums = 0.0
    if parts > 1:
        sums = 4 * shape[0] * shape[1] * (parts + 1) / CHIP.memory_bandwidth + 0.5
    assert seconds == pytest.approx(steps + 0.25 + sums)
    assert kernels == min(parts, 2)


@pytest.mark.parametrize(
    ("m", "nbytes", "sharpness", "seconds", "by_memory"),
    [
        (256, 0, 1, 1 + 1.25 + 0.5, False),
        (256, 10**6, 1, 1 + 1.25 + 0.5 + 2, True),
        (256, 10**5, 1, 1 + 1.25 + 0.5 + 0.2, False),
        (256, 10**6, 2, 1 + (1.25**2 + 0.5**2 + 2**2) ** 0.5, True),
        (0, 10**6, 1, 1, True),
    ],
)
def test_tiles_plateau_and_memory_are_felt_together(
    m: int, nbytes: int, sharpness: int, seconds: float, by_memory: bool
) -> None:
    """By their p-norm, beyond a kernel's floor; nothing multiplied takes the floor."""
    product = Gemm(m, 128, 64, 1, "bf16", nbytes)
    assert gemm_seconds(GemmSpec.model_construct(**GEMM | {"sharpness": sharpness}), CHIP, product) == (
        pytest.approx(seconds), 1, by_memory,
    )  # fmt: skip


KERNEL: dict[str, Any] = {
    "forward": 2.0 * 64 * 128 * 256 * 4, "forward_64": 1.0, "backward": 2.5 * 2.0 * 128 * 128 * 256 * 4,
    "backward_64": 1.0, "wide": 1.0, "wide_backward": 1.0, "causal": 0.5, "query_block": 64, "overhead": 1.0,
    "overhead_backward": 2.0, "tail": 0.5, "tail_backward": 0.25,
}  # fmt: skip
"""One block of 64 queries, or backward of 128 keys, takes a second on each of four multiprocessors."""


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "way", "seconds"),
    [
        (1, 64, 128, {}, 1 + 1),  # one block and what it pays more
        (1, 65, 129, {}, 2 + 1),  # two of two each
        (2, 64 * 8, 256, {}, 2 * 8 * (2 + 1) / 4 + 0.5 * 3),
        (8, 128, 128, {"causal": True}, (8 * (0.5 + 1 + 2 * 1) / 4 + 0.5 * 2) / 0.5),
        (8, 128, 256, {"causal": True}, (8 * (1.5 + 2 + 2 * 1) / 4 + 0.5 * 3) / 0.5),  # the queries are the last ones
        (8, 256, 128, {"causal": True}, (8 * (0.5 + 1 + 1 + 1 + 4 * 1) / 4 + 0.5 * 2) / 0.5),
        (1, 64 * 4096, 128 * 2048, {"causal": True}, (4096 * (4097 / 4 + 1) / 4 + 0.5 * 2049) / 0.5),
        (8, 128, 128, {"backward": True}, 8 * (1 + 2) / 4 + 0.25 * 3),
        (8, 256, 256, {"backward": True}, 8 * 2 * (2 + 2) / 4 + 0.25 * 4),
    ],
)
def test_blocks_of_queries_go_through_blocks_of_keys(
    heads: int, queries: int, keys: int, way: dict[str, bool], seconds: float
) -> None:
    """Shared out to the multiprocessors; the longest runs nearly alone at the end."""
    call = Attention(1, heads, queries, keys, 128, 128, **way)
    assert attention_seconds(AttentionKernel.model_construct(**KERNEL), CHIP, call) == pytest.approx(seconds)
    twice = Attention(2, heads * 5, queries, keys, 64 + 65, 127, **way)
    once = Attention(1, heads * 10, queries, keys, 64 + 65, 127, **way)
    assert attention_seconds(AttentionKernel.model_construct(**KERNEL), CHIP, twice) == pytest.approx(
        attention_seconds(AttentionKernel.model_construct(**KERNEL), CHIP, once)
    )


@pytest.mark.parametrize(
    ("dim", "way", "rate"),
    [
        (128, {}, 2), (65, {}, 2), (64, {}, 3), (129, {}, 2 * 0.5), (128, {"causal": True}, 2 * 0.7),
        (128, {"fp32": True}, 2 * 0.9), (128, {"backward": True}, 5), (64, {"backward": True}, 7),
        (65, {"backward": True}, 5), (129, {"backward": True}, 5 * 0.6),
        (128, {"backward": True, "fp32": True, "causal": True}, 5 * 0.7 * 0.9),
    ],
)  # fmt: skip
def test_the_rate_of_attention_goes_by_its_dimension(dim: int, way: dict[str, bool], rate: float) -> None:
    """Up to 64, up to 128, and beyond; 32 bits and a causal mask leave a part of it."""
    fields = {"forward": 2.0, "forward_64": 3.0, "backward": 5.0, "backward_64": 7.0, "wide": 0.5}
    fields |= {"wide_backward": 0.6, "causal": 0.7, "fp32": 0.9}
    call = Attention(1, 1, 1, 1, dim, 8, **way)
    ones = attention_seconds(EfficientKernel.model_construct(**KERNEL | dict.fromkeys(fields, 1.0)), CHIP, call)
    assert ones / attention_seconds(EfficientKernel.model_construct(**KERNEL | fields), CHIP, call) == pytest.approx(
        rate
    )


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "pairs"),
    [(3, 5, False, 15), (3, 3, True, 6), (3, 5, True, 3 * 2 + 6), (5, 3, True, 6), (1, 4, True, 4)],
)
def test_queries_meet_the_keys_up_to_their_own(queries: int, keys: int, causal: bool, pairs: int) -> None:
    """Flops are those of two products forward, and of five backward."""
    call = Attention(2, 3, queries, keys, 8, 16, causal)
    assert call.pairs == pairs
    assert call.flops == 2 * 2 * 3 * pairs * (8 + 16)
    assert Attention(2, 3, queries, keys, 8, 16, causal, backward=True).flops == 5 * 2 * 3 * pairs * (8 + 16)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "fp64"), (torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16"),
        (torch.float8_e4m3fn, "fp8"), (torch.float8_e5m2, "fp8"), (torch.int8, "fp32"), (torch.int64, "fp32"),
        (torch.complex64, "fp32"), (torch.complex128, "fp64"),
    ],
)  # fmt: skip
def test_the_type_in_which_a_product_is_computed(dtype: torch.dtype, name: str) -> None:
    """That of its operands; what no Tensor Core has goes as fp32."""
    assert math_dtype(dtype) == name


FULL = read_gpu("h100")
SHARES = {
    "elementwise": 0.5, "strided": 0.25, "reduction": 0.2, "norm": 0.1, "softmax_short": 0.8, "softmax": 0.4,
    "softmax_long": 0.05, "softmax_backward": 0.04, "gather": 0.16, "scatter": 0.08, "optimizer": 0.32, "random": 0.64,
}  # fmt: skip
MEMORY = vars(FULL.memory) | SHARES | {"floor": 10.0}
HOST = vars(FULL.host) | {"gap": 3.0, "h2d": 100.0, "d2h": 50.0, "pageable": 25.0, "transfer_floor": 7.0}
ALL = {
    name: KERNEL | {"forward": KERNEL["forward"] * factor}
    for name, factor in (("flash", 1), ("cudnn", 2), ("efficient", 4))
}
GPU = Pricing(
    GpuFile.model_construct(
        **vars(FULL)
        | {
            "chip": CHIP,
            "memory": type(FULL.memory).model_construct(**MEMORY),
            "host": type(FULL.host).model_construct(**HOST),
            "gemm": GemmSpec.model_construct(**GEMM),
            "attention": type(FULL.attention).model_construct(
                preferred="flash",
                flash=AttentionKernel.model_construct(**ALL["flash"]),
                cudnn=AttentionKernel.model_construct(**ALL["cudnn"]),
                efficient=AttentionKernel.model_construct(**ALL["efficient"]),
            ),
        }
    )
)


def test_bytes_go_through_memory_by_kernels_one_after_the_other() -> None:
    """A floor for each, a gap between two."""
    for kernels, seconds in ((1, 10 + 2), (3, 3 * 10 + 2 + 2 * 3)):
        cost = GPU.bytes(10**6, 0.5, "copy", kernels=kernels, flops=9)
        assert cost == Cost(seconds, kernels, 9, 10**6, "copy", True)
    assert GPU.bytes(10**6, 0.5, "copy", kernels=0) == Cost(0.0, 0, 0, 0, "none", False)


@pytest.mark.parametrize(
    ("to_device", "pinned", "seconds"),
    [(True, True, 7 + 10), (False, True, 7 + 20), (True, False, 7 + 40), (False, False, 7 + 40)],
)
def test_a_copy_goes_at_the_rate_of_its_way(to_device: bool, pinned: bool, seconds: float) -> None:
    """Unpinned memory through the driver's buffer."""
    kind = "h2d" if to_device else "d2h"
    assert GPU.transfer(1000, to_device=to_device, pinned=pinned) == Cost(seconds, 1, 0, 1000, kind, True)


def test_a_product_at_a_part_of_its_rate() -> None:
    """The floor stays; two kernels have a gap between them."""
    product = Gemm(256, 128, 64, 1, "bf16", 10**5)
    cost = GPU.gemm(product, rate=0.5)
    assert cost == Cost(pytest.approx(1 + 2 * (1.25 + 0.5 + 0.2)), 1, product.flops, 10**5, "gemm", False)
    assert GPU.gemm(product, kind="conv", flops=0) == Cost(pytest.approx(2.95), 1, 0, 10**5, "conv", False)
    split = Pricing(GPU.spec.replaced(gemm=GemmSpec.model_construct(**GEMM | {"split_k": True})))
    long = Gemm(256, 128, 1024)
    seconds, kernels, _ = gemm_seconds(split.spec.gemm, CHIP, long)
    assert (
        (split.gemm(long).seconds, split.gemm(long).kernels)
        == (pytest.approx(seconds + 3), kernels)
        == (seconds + 3, 2)
    )


@pytest.mark.parametrize(
    ("kernel", "way", "nbytes", "seconds", "kernels"),
    [
        ("flash", {}, 0, 2 + 10, 1),
        ("cudnn", {}, 0, 1 + 10, 1),
        ("flash", {}, 10**6, 2 + 10, 1),
        ("flash", {}, 2 * 10**6, 4 + 10, 1),
        ("flash", {"backward": True}, 0, 3 + 3 * 10 + 2 * 3, 3),
    ],
)
def test_attention_is_its_kernel_or_its_bytes(
    kernel: str, way: dict[str, bool], nbytes: int, seconds: float, kernels: int
) -> None:
    """Whichever takes longer; backward has a small kernel before and one after."""
    call = Attention(1, 1, 64, 128, 128, 128, **way)
    by_memory = nbytes > 10**6
    assert GPU.attention(call, kernel, nbytes) == Cost(
        pytest.approx(seconds), kernels, call.flops, nbytes, "attention", by_memory
    )


def many(count: int, *shape: int) -> list[Any]:
    return [meta(*shape, dtype=F32) for _ in range(count)]


X, ROWS, INDEX, TABLE = meta(4, 6, dtype=F32), meta(3, 5, dtype=F32), meta(3, dtype=I64), meta(10, 5, dtype=F32)
"""96, 60, 24 and 200 bytes."""
LARGE, TURNED = meta(512, 512, dtype=F32), meta(512, 512, dtype=F32).t()
MIB = 1 << 20
STATS = meta(6, dtype=F32)
NORM_BACKWARD = (X, X, [6], STATS, STATS, None, None, [True] * 3)
BYTES: list[tuple[Any, tuple[Any, ...], Any, list[tuple[int, str, int, str]]]] = [
    (aten._to_copy.default, (X,), meta(4, 6), [(96 + 48, "elementwise", 1, "copy")]),
    (aten.copy_.default, (LARGE, LARGE), LARGE, [(2 * MIB, "elementwise", 1, "copy")]),
    (aten.copy_.default, (LARGE, TURNED), LARGE, [(2 * MIB, "strided", 1, "copy")]),
    (aten.add.Tensor, (LARGE, TURNED), LARGE, [(3 * MIB, "strided", 1, "elementwise")]),
    (aten._foreach_copy_.default, (many(252, 1), many(252, 1)), None, [(2 * 4 * 252, "elementwise", 1, "copy")]),
    (aten._foreach_copy_.default, (many(253, 1), many(253, 1)), None, [(2 * 4 * 253, "elementwise", 2, "copy")]),
    (aten.zero_.default, (X,), X, [(96, "elementwise", 1, "elementwise")]),
    (aten._foreach_zero_.default, (many(770, 1),), None, [(4 * 770, "elementwise", 1, "elementwise")]),
    (aten._foreach_zero_.default, (many(771, 1),), None, [(4 * 771, "elementwise", 2, "elementwise")]),
    (aten.cat.default, ([X, X],), meta(8, 6, dtype=F32), [(4 * 96, "elementwise", 1, "copy")]),
    (aten.cat.default, ([meta(0)],), meta(0), [(0, "elementwise", 0, "none")]),
    (aten.select_backward.default, (STATS, [4, 6], 0, 1), X, [
        (96, "elementwise", 1, "elementwise"), (2 * 24, "elementwise", 1, "elementwise"),
    ]),
    (aten.embedding.default, (TABLE, INDEX), ROWS, [(2 * 60 + 24, "gather", 1, "embedding")]),
    (aten.index_select.default, (TABLE, 0, INDEX), ROWS, [(2 * 60 + 24, "gather", 1, "index")]),
    (aten.embedding_dense_backward.default, (ROWS, INDEX, 10, -1, False), TABLE, [
        (200, "elementwise", 1, "embedding"), (8 * 24, "scatter", 4, "embedding"), (2 * 60, "scatter", 1, "embedding"),
    ]),
    (aten.index_add_.default, (TABLE, 0, INDEX, ROWS), TABLE, [(3 * (24 + 60), "scatter", 1, "index")]),
    (aten.index_add.default, (TABLE, 0, INDEX, ROWS), TABLE, [
        (2 * 200, "elementwise", 1, "index"), (3 * (24 + 60), "scatter", 1, "index"),
    ]),
    (aten.sort.default, (X,), (X, meta(4, 6, dtype=I64)), [(4 * 2 * 24 * (4 + 8), "reduction", 2 + 4, "sort")]),
    (aten.topk.default, (X, 2), (meta(4, 2, dtype=F32), meta(4, 2, dtype=I64)), [
        (4 * 96 + 32 + 64, "reduction", 2, "sort"),
    ]),
    (aten.cumsum.default, (X, 0), X, [(2 * 96 + 96, "reduction", 2, "reduction")]),
    (aten.native_dropout.default, (X, 0.5, True), (X, meta(4, 6, dtype=torch.bool)), [
        (96 + 96 + 24, "random", 1, "random"),
    ]),
    (aten.normal_.default, (X,), X, [(96, "random", 1, "random")]),
    (aten._foreach_norm.Scalar, (many(8, 65_536),), many(8), [
        (8 * 4 * (65_536 + 1), "optimizer", 1, "optimizer"), (8 * 4, "elementwise", 1, "optimizer"),
    ]),
    (aten._softmax.default, (meta(2, 1024, dtype=F32), 1, False), meta(2, 1024, dtype=F32), [
        (4 * 4096, "softmax_short", 1, "softmax"),
    ]),
    (aten._softmax.default, (meta(2, 1025, dtype=F32), 1, False), meta(2, 1025, dtype=F32), [
        (4 * 4100, "softmax", 1, "softmax"),
    ]),
    (aten._softmax.default, (meta(16_384, dtype=F32), 0, False), meta(16_384, dtype=F32), [
        (2 * 65_536, "softmax", 1, "softmax"),
    ]),
    (aten._softmax.default, (meta(16_385, dtype=F32), 0, False), meta(16_385, dtype=F32), [
        (2 * 65_540, "softmax_long", 1, "softmax"),
    ]),
    (aten._softmax_backward_data.default, (*many(2, 16_385), 0, F32), meta(16_385, dtype=F32), [
        (3 * 65_540, "softmax_backward", 1, "softmax"),
    ]),
    (aten.nll_loss_forward.default, (X, INDEX, None, 1, -100), (STATS, STATS), [
        (5 * 24 + 2 * 24, "gather", 1, "reduction"),
    ]),
    (aten.nll_loss_backward.default, (STATS, X, INDEX, None, 1, -100, STATS), X, [
        (96, "elementwise", 1, "index"), (5 * 24, "gather", 1, "index"),
    ]),
    (aten.native_layer_norm.default, (X, [6], STATS, STATS, 1e-5), (X, STATS, STATS), [
        (2 * 96 + 4 * 24, "norm", 1, "norm"),
    ]),
    (aten.native_batch_norm.default, (X, None, None, None, None, True, 0.1, 1e-5), (X, STATS, STATS), [
        (3 * 96 + 2 * 24, "norm", 2, "norm"),
    ]),
    (aten.native_batch_norm.default, (X, None, None, None, None, False, 0.1, 1e-5), (X, STATS, STATS), [
        (2 * 96 + 2 * 24, "norm", 1, "norm"),
    ]),
    (aten.batch_norm_stats.default, (X, 1e-5), (STATS, STATS), [(96 + 2 * 24, "norm", 1, "norm")]),
    (aten.native_layer_norm_backward.default, NORM_BACKWARD, (X, None, None), [(3 * 96, "norm", 1, "norm")]),
    (aten.sum.default, (X,), meta(dtype=F32), [(96 + 4, "reduction", 1, "reduction")]),
    (aten.sum.default, (meta(MIB, dtype=F32),), meta(dtype=F32), [(4 * MIB + 4, "reduction", 1, "reduction")]),
    (aten.sum.default, (meta(MIB + 1, dtype=F32),), meta(dtype=F32), [
        (4 * MIB + 8, "reduction", 1, "reduction"), (0, "reduction", 1, "reduction"),
    ]),
    (aten.sum.dim_IntList, (meta(MIB + 1, 2, dtype=F32), [1]), meta(MIB + 1, dtype=F32), [
        (3 * 4 * (MIB + 1), "reduction", 1, "reduction"),
    ]),
    (aten.max.default, (X,), meta(dtype=F32), [(96 + 4, "reduction", 1, "reduction")]),
    (aten.max.other, (X, X), X, [(3 * 96, "elementwise", 1, "elementwise")]),
]  # fmt: skip
"""Operator, arguments, result -> bytes, share of the bandwidth, kernels and kind of each of its parts."""


@pytest.mark.parametrize(("func", "args", "result", "parts"), BYTES, ids=lambda value: str(value)[:24])
def test_what_moves_bytes(
    func: Any, args: tuple[Any, ...], result: Any, parts: list[tuple[int, str, int, str]]
) -> None:
    """Each tensor as often as its kernels read and write it, at the share that such kernels reach."""
    cost = Gpu(GPU.spec).cost(func, args, {}, result)
    expected = [GPU.bytes(moved, SHARES[share], kind, kernels=kernels) for moved, share, kernels, kind in parts]
    assert (cost.kernels, cost.nbytes) == (sum(one.kernels for one in expected), sum(one.nbytes for one in expected))
    assert cost.seconds == pytest.approx(sum(one.seconds for one in expected))
    assert cost.kind == expected[0].kind


@pytest.mark.parametrize(
    ("elements_per_s", "seconds", "by_memory"), [(1.0, 24 + 2 * 10, False), (1e9, 2 * 10 + 3 + 5 * 96 / 5e5, True)]
)
def test_a_norms_backward_goes_by_its_elements_or_its_bytes(
    elements_per_s: float, seconds: float, by_memory: bool
) -> None:
    """By rows and by columns, each through both operands."""
    memory = type(FULL.memory).model_construct(**MEMORY | {"norm_backward": elements_per_s})
    args = (X, X, [6], STATS, STATS, STATS, STATS, [True] * 3)
    gpu = Gpu(GpuFile.model_construct(**vars(GPU.spec) | {"memory": memory}))
    cost = gpu.cost(aten.native_layer_norm_backward.default, args, {}, (X, STATS, STATS))
    assert cost == Cost(pytest.approx(seconds), 2, 0, 5 * 96, "norm", by_memory)


PRODUCTS: list[tuple[Any, tuple[Any, ...], Any, tuple[int, ...]]] = [
    (aten.mm.default, (meta(4, 6), meta(6, 8)), meta(4, 8), (4, 8, 6, 1)),
    (aten.bmm.default, (meta(3, 4, 6), meta(3, 6, 8)), meta(3, 4, 8), (4, 8, 6, 3)),
    (aten.addmm.default, (meta(8), meta(4, 6), meta(6, 8)), meta(4, 8), (4, 8, 6, 1)),
    (aten.baddbmm.default, (meta(3, 4, 8), meta(3, 4, 6), meta(3, 6, 8)), meta(3, 4, 8), (4, 8, 6, 3)),
    (aten.linear.default, (meta(2, 4, 6), meta(8, 6)), meta(2, 4, 8), (2 * 4, 8, 6, 1)),
    (aten._grouped_mm.default, (meta(9, 6), meta(2, 6, 8), INDEX[:2]), meta(9, 8), (5, 8, 6, 2)),
    (aten._grouped_mm.default, (meta(2, 4, 6), meta(6, 9), INDEX[:2]), meta(4, 9), (4, 5, 6, 2)),
    (aten._grouped_mm.default, (meta(4, 9), meta(9, 8), INDEX[:2]), meta(2, 4, 8), (4, 8, 5, 2)),
    (aten._grouped_mm.default, (meta(3, 4, 6), meta(3, 6, 8)), meta(3, 4, 8), (4, 8, 6, 3)),
]


@pytest.mark.parametrize(("func", "args", "result", "shape"), PRODUCTS, ids=lambda value: str(value)[:24])
def test_what_multiplies(func: Any, args: tuple[Any, ...], result: Any, shape: tuple[int, ...]) -> None:
    """Rows, columns, inner dimension and batch; groups are taken to be of one size, rounded up."""
    moved = nbytes(args) + nbytes(result)
    cost = Gpu(GPU.spec).cost(func, args, {}, result)
    assert (cost.seconds, cost.flops, cost.nbytes) == (
        GPU.gemm(Gemm(*shape, "bf16", moved)).seconds, 2 * math.prod(shape), moved,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("image", "filters", "groups", "transposed", "output", "shape"),
    [
        ((2, 6, 9, 9), (8, 6, 3, 3), 1, False, (2, 8, 7, 7), (2 * 49, 8, 6 * 9, 1)),
        ((2, 6, 9, 9), (8, 3, 3, 3), 2, False, (2, 8, 7, 7), (2 * 49, 4, 3 * 9, 2)),
        ((2, 6, 9, 9), (6, 8, 3, 3), 1, True, (2, 8, 11, 11), (2 * 81, 6, 8 * 9, 1)),
    ],
)
def test_a_convolution_is_the_product_of_pixels_and_filters(
    image: tuple[int, ...], filters: tuple[int, ...], groups: int, transposed: bool, output: tuple[int, ...],
    shape: tuple[int, ...],
) -> None:  # fmt: skip
    """Backward has one for each gradient that is asked for, and a sum for the bias."""
    given, weight, result = meta(*image), meta(*filters), meta(*output)
    moved = nbytes([given, weight, result])
    one = GPU.gemm(Gemm(*shape, "bf16", moved), kind="conv")
    rest = ([1, 1], [0, 0], [1, 1], transposed, [0, 0], groups)
    assert Gpu(GPU.spec).cost(aten.convolution.default, (given, weight, None, *rest), {}, result) == one
    bias = GPU.bytes(nbytes(result), SHARES["reduction"], "reduction")
    for mask, parts in (
        ([True, True, True], [one, one, bias]), ([True, False, False], [one]), ([False, True, True], [one, bias]),
        ([False, False, True], [bias]), ([False] * 3, []),
    ):  # fmt: skip
        args = (result, given, weight, [8], *rest, mask)
        cost = Gpu(GPU.spec).cost(aten.convolution_backward.default, args, {}, (given, weight, STATS))
        assert (cost.seconds, cost.kernels) == (pytest.approx(sum(p.seconds for p in parts)), len(parts))


@pytest.mark.parametrize(
    ("parts", "read", "seconds", "kernels", "moved"),
    [
        ([("elementwise", 1, 50.0)], 1000, 50, 1, 100),  # one part that moves no less stays what it is
        ([("elementwise", 1, 50.0)], 50, 10 + 60 / 5e5, 1, 60),
        ([("elementwise", 1, 50.0), ("elementwise", 1, 60.0)], 1000, 10 + 1010 / 5e5, 1, 1010),
        ([("norm", 2, 50.0), ("elementwise", 1, 60.0)], 1000, 20 + 3 + 2010 / 2e5, 2, 2010),
        ([("norm", 2, 5.0), ("elementwise", 1, 6.0)], 1000, 5 + 6 + 3, 2, 2010),  # never more than one by one
    ],
)
def test_a_fused_kernel_goes_over_its_rows_as_often_as_its_parts(
    parts: list[tuple[str, int, float]], read: int, seconds: float, kernels: int, moved: int
) -> None:
    """At the share of a reduction where one is among them; the kind is that of the longest."""
    costs = [Cost(time, number, 7, 100, kind, True) for kind, number, time in parts]
    assert fused_cost(Gpu(GPU.spec), costs, read, 10) == Cost(
        pytest.approx(seconds), kernels, 7 * len(parts), moved, parts[-1][0], True
    )


Q4, K4, V4 = meta(2, 3, 64, 32), meta(2, 3, 128, 32), meta(2, 3, 128, 16)
"""Batch, heads, length and dimension; Flash's own operator has heads behind the length."""
Q, K, V = meta(2, 64, 3, 32), meta(2, 128, 3, 32), meta(2, 128, 3, 16)
STARTS = meta(3, dtype=torch.int32)
PLAIN = Attention(2, 3, 64, 128, 32, 16)
sdpa, flash, efficient = (
    aten.scaled_dot_product_attention,
    aten._flash_attention_forward,
    aten._efficient_attention_forward,
)
ATTENTION: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (aten._scaled_dot_product_flash_attention, (Q4, K4, V4), {}, "flash"),
    (aten._scaled_dot_product_flash_attention, (Q4, K4, V4, 0.0, True), {"causal": True}, "flash"),
    (aten._scaled_dot_product_cudnn_attention, (Q4, K4, V4, None, True), {}, "cudnn"),
    (aten._scaled_dot_product_fused_attention_overrideable, (Q4, K4, V4), {}, "flash"),
    (sdpa, (Q4, K4, V4), {}, "flash"),
    (sdpa, (Q4[0], K4[0], V4[0]), {"batch": 1}, "flash"),
    (sdpa, (Q4[0, 0], K4[0, 0], V4[0, 0]), {"batch": 1, "heads": 1}, "flash"),
    (sdpa, (Q4, K4, V4, meta(64, 128)), {}, "efficient"),
    (sdpa, (Q4.float(), K4.float(), V4.float()), {"fp32": True}, "efficient"),
    (flash, (Q, K, V, None, None, 64, 128, 0.0, True, False), {"causal": True}, "flash"),
    (
        flash,
        (Q.flatten(0, 1), K.flatten(0, 1), V.flatten(0, 1), STARTS, STARTS, 64, 128, 0.0, False, False),
        {},
        "flash",
    ),
    (efficient, (Q, K, V, None, None, None, None, None, 0.0, 0), {}, "efficient"),
    (efficient, (Q, K, V, None, None, None, None, None, 0.0, 1), {"causal": True}, "efficient"),
    (
        aten._scaled_dot_product_flash_attention_backward,
        (V4, Q4, K4, V4, V4, STATS, STARTS, STARTS, 64, 128, 0.0, True, STATS, STATS),
        {"causal": True, "backward": True},
        "flash",
    ),
]
"""Operator, arguments -> in what its shape differs from that of PLAIN, and its kernel."""


@pytest.mark.parametrize(("packet", "args", "shape", "kernel"), ATTENTION, ids=lambda value: str(value)[:40])
def test_attention_has_the_shape_of_its_arguments(
    packet: Any, args: tuple[Any, ...], shape: dict[str, Any], kernel: str
) -> None:
    """Packed sequences are taken to be equally long; a mask that is a tensor, or 32 bits, need the efficient kernel."""
    cost = Gpu(GPU.spec).cost(packet.default, args, {}, V4)
    assert cost == GPU.attention(replace(PLAIN, **shape), kernel, cost.nbytes)


@pytest.mark.parametrize(
    ("schema", "args", "result", "moved", "share"),
    [
        ("megatron::scaled_upper_triang_masked_softmax(Tensor scores)", (X,), X, 48 + 96, "softmax_short"),
        (
            "megatron::scaled_upper_triang_masked_softmax_backward(Tensor g, Tensor o)",
            (X, X),
            X,
            96 + 96,
            "softmax_short",
        ),
        ("xentropy::forward(Tensor logits, Tensor labels)", (X, INDEX), STATS, 2 * 96 + 24 + 24, "elementwise"),
        ("xentropy::backward(Tensor g, Tensor logits)", (STATS, X), X, 24 + 2 * 96, "elementwise"),
    ],
)
def test_kernels_of_packages(schema: str, args: tuple[Any, ...], result: Any, moved: int, share: str) -> None:
    """Megatron-LM's reads no further than the diagonal; a cross entropy goes over its logits twice."""
    func = SimpleNamespace(_schema=torch._C.parse_schema(f"{schema} -> Tensor"))
    call = OperatorCall(func, args, {}, result)
    assert RULES[call.name](GPU, call) == GPU.bytes(moved, SHARES[share], "softmax")


def test_a_value_that_the_host_reads_goes_over_pcie() -> None:
    """One element of it, to the host."""
    assert Gpu(GPU.spec).cost(aten._local_scalar_dense.default, (X,), {}, 1.0) == GPU.transfer(
        4, to_device=False, pinned=True
    )


def test_a_depthwise_convolution_has_a_group_for_each_channel() -> None:
    """Which its operator does not say."""
    given, weight, output = meta(2, 6, 9, 9), meta(6, 1, 3, 3), meta(2, 6, 7, 7)
    args = (given, weight, [3, 3], None, [1, 1], [0, 0], [1, 1])
    expected = GPU.gemm(Gemm(2 * 49, 1, 9, 6, "bf16", nbytes([given, weight, output])), kind="conv")
    assert Gpu(GPU.spec).cost(aten._conv_depthwise2d.default, args, {}, output) == expected


def test_a_matrix_by_a_vector_is_its_bytes() -> None:
    """With two flops for each element of the matrix."""
    cost = Gpu(GPU.spec).cost(aten.mv.default, (X, STATS), {}, meta(4, dtype=F32))
    assert cost == GPU.bytes(96 + 24 + 16, SHARES["elementwise"], "gemm", flops=2 * 24)


@pytest.mark.parametrize(
    ("func", "num_lists", "most"),
    [
        (aten._foreach_add_.Scalar, 1, 770), (aten._foreach_add_.List, 2, 448),
        (aten._foreach_addcmul_.Scalar, 3, 336), (aten._fused_adam_.default, 4, 252),
        (aten._fused_adam_.default, 5, 210),
    ],
)  # fmt: skip
def test_a_launch_takes_so_many_tensors(func: Any, num_lists: int, most: int) -> None:
    """By how many lists it has (MultiTensorApply.cuh)."""
    for count, kernels in ((most, 1), (most + 1, 2)):
        lists = [many(count, 2) for _ in range(num_lists)]
        cost = Gpu(GPU.spec).cost(func, tuple(lists), {}, None)
        assert cost.kernels == kernels


@pytest.mark.parametrize(
    ("given", "output", "transposed"),
    [
        (TURNED, LARGE, True),
        (LARGE, LARGE, False),
        (LARGE, TURNED, True),
        (TURNED.unsqueeze(2), LARGE.unsqueeze(2), True),  # a dimension of one element does not count
        (meta(512, 511, dtype=F32).t(), meta(511, 512, dtype=F32), False),  # less than a MiB fits into a cache
        (meta(MIB, 1), meta(1, MIB).t(), False),  # one element is as fast either way
        (meta(512, 1, dtype=F32).expand(512, 512), LARGE, False),
    ],
)
def test_what_is_transposed(given: Any, output: Any, transposed: bool) -> None:
    """A large input whose fastest dimension is another than the output's, of the same shape."""
    assert is_transposed(OperatorCall(aten.relu.default, (given,), {}, output)) == transposed


@pytest.mark.parametrize(
    ("schema", "is_view"),
    [
        ("x::a(Tensor(a) self) -> Tensor(a)", True),
        ("x::a(Tensor(a) self) -> (Tensor(a), Tensor)", False),
        ("x::a(Tensor(a!) self) -> Tensor(a!)", False),
        ("x::a(Tensor self) -> ()", False),
    ],
)
def test_a_view_is_all_arguments_seen_otherwise(schema: str, is_view: bool) -> None:
    """And nothing is written."""
    func = SimpleNamespace(_schema=torch._C.parse_schema(schema))
    assert OperatorCall(func, (X,), {}, X).is_view == is_view
