"""Prices on one GPU that the rules use: bytes, matrix products, attention, copies over PCIe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from distsim.kernels.cost import Cost, OperatorCall
from distsim.kernels.gpu_file import AttentionKernel, ChipSpec, EfficientKernel, GemmSpec, GpuFile

# -- How long a matrix product takes: tiles on multiprocessors in waves, under the plateau that power sets.

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
_LEAST_K = 512
"""Smallest part of k worth a split: for shorter parts the reduction costs more than the split gains."""
_K_STEP = 64
"""Step of a tile along k: 64 elements, which are 128 bytes of 16-bit operands."""
_TILE_ELEMENTS = 32_768


@dataclass(frozen=True, slots=True)
class Gemm:
    """*batch* matrix products of m x k by k x n."""

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bf16"
    """Data type of the multiplication: fp64, fp32, tf32, fp16, bf16, fp8 or fp4."""
    nbytes: int = 0
    """Bytes of the operands and the result."""

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


def gemm_seconds(spec: GemmSpec, chip: ChipSpec, gemm: Gemm) -> tuple[float, int, bool]:
    """Return the seconds of a matrix product, its number of kernels, and whether memory limits it.

    The device computes a grid of tiles in waves, one tile per multiprocessor; an incomplete last wave takes as long as
    a full one. Large products reach the power limit, at which clocks fall. Where two of the limits (tiles, power,
    memory) are close, both slow the product down (a p-norm).
    """
    if not gemm.flops:
        return spec.floor, 1, True
    peak = chip.peak(gemm.dtype)
    tiles, splits = _best(spec, chip, gemm, peak)
    power = gemm.flops / (peak * spec.sustained(gemm.dtype))
    memory = gemm.nbytes / (chip.memory_bandwidth * spec.memory)
    p = spec.sharpness
    longest = max(tiles, power, memory)
    joined = longest * sum((each / longest) ** p for each in (tiles, power, memory)) ** (1 / p)
    return spec.floor + joined, 1 if splits == 1 else 2, memory == longest


def _best(spec: GemmSpec, chip: ChipSpec, gemm: Gemm, peak: float) -> tuple[float, int]:
    """Return the seconds of the best tile and its number of splits along k. The library's heuristic is assumed to find
    it.
    """
    best, splits = float("inf"), 1
    rate = peak / chip.multiprocessors * spec.mma
    for rows, columns, relative in _shapes(tuple(spec.tiles.items())):
        grid = -(-gemm.m // rows) * -(-gemm.n // columns) * gemm.batch
        per_step = 2 * rows * columns * _K_STEP / (rate * relative)
        once = spec.tile_overhead * rows * columns / _TILE_ELEMENTS
        for split in _splits(spec, grid, gemm.k, chip.multiprocessors):
            steps = -(-gemm.k // (split * _K_STEP))
            waves = -(-grid * split // chip.multiprocessors)
            seconds = waves * (steps * per_step + once)
            if split > 1:  # partial sums in fp32 are written, read and added up by a second kernel
                partial = 4 * gemm.batch * gemm.m * gemm.n * (split + 1)
                seconds += partial / (chip.memory_bandwidth * spec.memory) + spec.floor / 2
            if seconds < best:
                best, splits = seconds, split
    return best, splits


def _splits(spec: GemmSpec, grid: int, k: int, multiprocessors: int) -> Iterator[int]:
    for split in _SPLITS:
        if split > 1 and (not spec.split_k or grid >= multiprocessors or k // split < _LEAST_K):
            return
        yield split


@cache
def _shapes(tiles: tuple[tuple[str, float], ...]) -> tuple[tuple[int, int, float], ...]:
    """Return the tiles as numbers, in both orientations."""
    shapes = []
    for text, relative in tiles:
        rows, columns = map(int, text.split("x"))
        shapes.append((rows, columns, relative))
        if rows != columns:
            shapes.append((columns, rows, relative))
    return tuple(shapes)


# -- How long fused attention takes: blocks of queries over blocks of keys, shared out to the multiprocessors.

_KEYS = 128
"""Number of keys in one block."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Shape of an attention call; *heads* is the number of heads of the queries."""

    batch: int
    heads: int
    queries: int
    keys: int
    dim: int
    """Head dimension of queries and keys."""
    value_dim: int
    causal: bool = False
    backward: bool = False
    fp32: bool = False

    @property
    def pairs(self) -> int:
        """Return the number of query-key pairs of one head; a causal mask leaves about half of them."""
        if not self.causal:
            return self.queries * self.keys
        past = max(0, self.keys - self.queries)
        seen = min(self.queries, self.keys)
        return self.queries * past + seen * (seen + 1) // 2

    @property
    def flops(self) -> int:
        """Floating-point operations as FlashAttention counts them: two products forward, five backward."""
        forward = 2 * self.batch * self.heads * self.pairs * (self.dim + self.value_dim)
        return forward * 5 // 2 if self.backward else forward


def attention_seconds(kernel: AttentionKernel, chip: ChipSpec, call: Attention) -> float:
    """Return the seconds of an attention kernel beyond its fixed cost.

    Each block of queries processes its blocks of keys, plus *overhead* blocks for its start and end; with a causal
    mask the blocks on the diagonal are computed completely. At the end of the kernel the longest blocks run nearly
    alone (*tail*).
    """
    rate = _rate(kernel, call)
    overhead = kernel.overhead_backward if call.backward else kernel.overhead
    tail = kernel.tail_backward if call.backward else kernel.tail
    rows = _KEYS if call.backward else kernel.query_block  # backward's blocks are of keys, and as many
    blocks = -(-call.queries // rows)
    longest = -(-call.keys // _KEYS)
    ratio = rows / _KEYS
    if call.causal:
        first = max(0, call.keys - call.queries) / _KEYS
        work = (
            sum(min(longest, first + (block + 1) * ratio) for block in range(blocks))
            if blocks < 4096
            else (blocks * (first + (blocks + 1) / 2 * ratio))
        )
    else:
        work = float(blocks * longest)
    work += blocks * overhead
    work *= call.batch * call.heads
    longest_block = longest + overhead
    spread = work / chip.multiprocessors
    units = max(spread + tail * longest_block, longest_block)
    one = 2 * rows * _KEYS * (call.dim + call.value_dim) * (2.5 if call.backward else 1.0)
    return units * one * chip.multiprocessors / rate


def _rate(kernel: AttentionKernel, call: Attention) -> float:
    """Return the flop/s of a long sequence on the whole device."""
    if call.backward:
        rate = kernel.backward_64 if call.dim <= 64 else kernel.backward
        rate *= kernel.wide_backward if call.dim > 128 else 1.0
    else:
        rate = kernel.forward_64 if call.dim <= 64 else kernel.forward
        rate *= kernel.wide if call.dim > 128 else 1.0
    if call.fp32 and isinstance(kernel, EfficientKernel):
        rate *= kernel.fp32
    return rate * (kernel.causal if call.causal else 1.0)


_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
}


def math_dtype(dtype: Any, kind: str = "gemm") -> str:
    """Return the type in which a product of *dtype* is computed; fp32 becomes tf32 if the program currently allows it,
    as it does for cuDNN's convolutions (*kind* "conv") unless it says otherwise.

    `fp32_precision` follows all the ways to allow it; reading `allow_tf32` raises where a program sets the former.
    """
    if dtype == torch.float32 and "tf32" in (
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision if kind == "conv" else "",
    ):
        return "tf32"
    if dtype == torch.float4_e2m1fn_x2:
        return "fp4"
    if dtype.is_floating_point and dtype.itemsize == 1:
        return "fp8"
    return _DTYPES.get(dtype, "fp32")


class Pricing:
    """Prices on one GPU, from its data file."""

    def __init__(self, spec: GpuFile) -> None:
        self.spec = spec

    def bytes(self, nbytes: int, efficiency: float, kind: str, *, kernels: int = 1, flops: int = 0) -> Cost:
        """Price *nbytes* of memory traffic at a share of the bandwidth, by *kernels* consecutive kernels."""
        if not kernels:
            return Cost(0.0, 0, 0, 0, "none", False)
        seconds = kernels * self.spec.memory.floor + nbytes / (self.spec.chip.memory_bandwidth * efficiency)
        seconds += (kernels - 1) * self.spec.host.gap
        return Cost(seconds, kernels, flops, nbytes, kind, True)

    def gemm(self, gemm: Gemm, *, kind: str = "gemm", rate: float = 1.0, flops: int | None = None) -> Cost:
        """Price one matrix product; *rate* is its speed relative to a plain product."""
        seconds, kernels, memory_bound = gemm_seconds(self.spec.gemm, self.spec.chip, gemm)
        seconds = self.spec.gemm.floor + (seconds - self.spec.gemm.floor) / rate
        seconds += (kernels - 1) * self.spec.host.gap
        return Cost(seconds, kernels, gemm.flops if flops is None else flops, gemm.nbytes, kind, memory_bound)

    def attention(self, call: Attention, kernel: str, nbytes: int) -> Cost:
        """Price fused attention by the kernel flash, cudnn or efficient.

        The backward pass has two small kernels besides: the sum of the output's gradient, and the conversion of the
        queries' gradient to 16 bits.
        """
        rates = getattr(self.spec.attention, kernel)
        math = attention_seconds(rates, self.spec.chip, call)
        memory = nbytes / (self.spec.chip.memory_bandwidth * self.spec.memory.elementwise)
        kernels = 3 if call.backward else 1
        seconds = max(math, memory) + kernels * self.spec.memory.floor + (kernels - 1) * self.spec.host.gap
        return Cost(seconds, kernels, call.flops, nbytes, "attention", memory > math)

    def transfer(self, nbytes: int, *, to_device: bool, pinned: bool) -> Cost:
        """Price a copy between host and GPU."""
        host = self.spec.host
        rate = (host.h2d if to_device else host.d2h) if pinned else min(host.pageable, host.h2d)
        return Cost(host.transfer_floor + nbytes / rate, 1, 0, nbytes, "h2d" if to_device else "d2h", True)


Rule = Callable[[Pricing, OperatorCall], Cost]

RULES: dict[str, Rule] = {}
"""Pricing rules by the operator's name in its schema (`aten::mm`), for all its overloads."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the pricing rule of the named operators; a name without a namespace is in aten."""

    def register(rule: Rule) -> Rule:
        for name in names:
            RULES[name if "::" in name else f"aten::{name}"] = rule
        return rule

    return register
