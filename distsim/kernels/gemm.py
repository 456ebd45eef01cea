"""How long a matrix product takes: tiles on multiprocessors in waves, under the plateau that power sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from distsim.kernels.gpu_file import ChipSpec, GemmSpec

__all__ = ["Gemm", "gemm_seconds"]

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
_LEAST_K = 512
"""A split of k that is shorter than this pays more for its reduction than it gains."""
_K_STEP = 64
"""Tiles go through k in steps of 64 (128 bytes of 16-bit operands)."""
_TILE_ELEMENTS = 32_768


@dataclass(frozen=True, slots=True)
class Gemm:
    """*batch* products of m x k by k x n."""

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bf16"
    """Of the multiplication: fp64, fp32, tf32, fp16, bf16, fp8 or fp4."""
    nbytes: int = 0
    """Operands and result."""

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


def gemm_seconds(spec: GemmSpec, chip: ChipSpec, gemm: Gemm) -> tuple[float, int, bool]:
    """Seconds of one product, how many kernels it is, and whether memory is what limits it.

    The device runs a grid of tiles in waves of as many as it has multiprocessors; a last wave that is not full takes
    as long as a full one. Under its power limit a large product is slower than its tiles: clocks fall. Where two of
    tiles, plateau and memory come near each other both are felt (a p-norm).
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
    """Seconds in the best of the tiles, and how often it splits k: the library's heuristic is taken to be right."""
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
    """Tiles as numbers, either way round."""
    found = []
    for text, relative in tiles:
        rows, columns = map(int, text.split("x"))
        found.append((rows, columns, relative))
        if rows != columns:
            found.append((columns, rows, relative))
    return tuple(found)
