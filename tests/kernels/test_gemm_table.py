"""Matrix products on a chip of four multiprocessors: tiles, waves and steps counted by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distsim.kernels.gpu_file import read_gpu
from distsim.kernels.pricing import Gemm, gemm_seconds

TILE_S = 1e-3
"""What a tile of 128 x 64 needs for one step of 64 along k."""
FLOPS = 2 * 128 * 64 * 64 / TILE_S


def chip(**changed: Any) -> Any:
    """Each multiprocessor makes a tile's step in TILE_S, and memory is no limit."""
    fields = {"multiprocessors": 4, "memory_bandwidth": 1e30, "peak": lambda dtype: 4 * FLOPS}
    return SimpleNamespace(**{**fields, **changed})


def spec(**changed: Any) -> Any:
    """One kind of tile without overheads; neither plateau nor split."""
    base = read_gpu("h100").gemm
    fields = {"plateau": {"bf16": 1e9}, "mma": 1.0, "tiles": {"128x64": 1.0}, "tile_overhead": 0.0, "split_k": False}
    fields |= {"memory": 1.0, "sharpness": 50.0, "floor": 0.0}
    return type(base)(**{**vars(base), **fields, **changed})


def seconds(gemm: Gemm, chip: Any = None, **changed: Any) -> float:
    return gemm_seconds(spec(**changed), chip or CHIP, gemm)[0]


CHIP = chip()
STEPS = {
    # m, n, k, batch -> waves of four tiles of 128 x 128, times steps of 64 along k
    (128, 128, 64, 1): 1,
    (1, 1, 1, 1): 1,
    (128, 128, 65, 1): 2,
    (128, 128, 128, 1): 2,
    (128, 128, 129, 1): 3,
    (129, 128, 64, 1): 1,
    (512, 128, 64, 1): 1,
    (513, 128, 64, 1): 2,
    (128, 513, 64, 1): 2,
    (256, 256, 64, 1): 1,
    (257, 256, 64, 1): 2,
    (128, 128, 64, 4): 1,
    (128, 128, 64, 5): 2,
    (129, 129, 64, 1): 1,
    (129, 129, 64, 2): 2,
    (512, 256, 640, 1): 20,
}


@pytest.mark.parametrize(("shape", "steps"), STEPS.items())
def test_waves_and_steps_are_rounded_up(shape: tuple[int, int, int, int], steps: int) -> None:
    """A tile that is not full costs a full one, and so does a wave."""
    assert seconds(Gemm(*shape), tiles={"128x128": 1.0}) == pytest.approx(2 * steps * TILE_S, rel=1e-6)


def test_a_tile_lies_either_way_round() -> None:
    """64 x 512 are four tiles that lie and eight that stand: the better way is taken."""
    assert seconds(Gemm(64, 512, 64)) == pytest.approx(TILE_S, rel=1e-6)
    assert seconds(Gemm(512, 64, 64)) == pytest.approx(TILE_S, rel=1e-6)


def test_a_slower_tile_takes_longer_and_a_smaller_one_wins_where_it_fills_the_chip() -> None:
    """By its rate beside the largest one's."""
    assert seconds(Gemm(128, 64, 64), tiles={"128x64": 0.5}) == pytest.approx(2 * TILE_S, rel=1e-6)
    both = {"128x64": 1.0, "32x64": 0.8}
    assert seconds(Gemm(128, 64, 64), tiles=both) == pytest.approx(TILE_S / 4 / 0.8, rel=1e-6)
    assert seconds(Gemm(512, 64, 64), tiles=both) == pytest.approx(TILE_S, rel=1e-6)


def test_overheads_are_of_each_wave_and_kernel() -> None:
    """Prologue and epilogue go with the tile's elements; the floor is of the kernel."""
    assert seconds(Gemm(513, 64, 64), tile_overhead=4e-3) == pytest.approx(2 * (TILE_S + 1e-3), rel=1e-6)
    assert seconds(Gemm(513, 64, 64), floor=5e-3) == pytest.approx(2 * TILE_S + 5e-3, rel=1e-6)
    assert gemm_seconds(spec(floor=5e-3), CHIP, Gemm(0, 64, 64)) == (5e-3, 1, True)


def test_the_main_loops_share_is_a_factor_of_the_rate() -> None:
    """Of each multiprocessor, and of the plateau for the whole product."""
    assert seconds(Gemm(128, 64, 64), mma=0.5) == pytest.approx(2 * TILE_S, rel=1e-6)
    assert seconds(Gemm(512, 64, 64), plateau={"bf16": 0.1}) == pytest.approx(10 * TILE_S, rel=1e-6)


def test_memory_limits_a_product_of_many_bytes() -> None:
    """Bytes over the share of the bandwidth; who is the limit is said."""
    slow = chip(memory_bandwidth=1e6)
    answer = gemm_seconds(spec(memory=0.5), slow, Gemm(128, 64, 64, nbytes=50_000))
    assert answer == (pytest.approx(0.1, rel=1e-6), 1, True)
    assert not gemm_seconds(spec(memory=0.5), slow, Gemm(128, 64, 64, nbytes=50))[2]


def test_two_limits_that_meet_are_both_felt() -> None:
    """A p-norm: two equal ones make 2^(1/p) of one."""
    slow = chip(memory_bandwidth=1e6)
    both = seconds(Gemm(128, 64, 64, nbytes=1000), slow, sharpness=2.0)
    assert both == pytest.approx(TILE_S * 2**0.5, rel=1e-6)


SPLITS = {
    # k -> the split that one tile of it gets on four multiprocessors
    64 * 8: 1,
    64 * 16 - 1: 1,
    64 * 16: 2,
    64 * 24: 3,
    64 * 32: 4,
    64 * 256: 4,
}


@pytest.mark.parametrize(("k", "split"), SPLITS.items())
def test_a_product_that_leaves_multiprocessors_idle_is_split_along_k(k: int, split: int) -> None:
    """Into parts of at least 512, as long as that is quicker; then it is two kernels."""
    took, kernels, _ = gemm_seconds(spec(split_k=True), CHIP, Gemm(128, 64, k))
    assert took == pytest.approx(-(-k // (split * 64)) * TILE_S, rel=1e-6)
    assert kernels == (1 if split == 1 else 2)


def test_a_grid_that_fills_the_chip_is_not_split() -> None:
    """However long k is."""
    took, kernels, _ = gemm_seconds(spec(split_k=True), CHIP, Gemm(512, 64, 64 * 32))
    assert (took, kernels) == (pytest.approx(32 * TILE_S, rel=1e-6), 1)


def test_a_split_pays_for_its_partial_sums() -> None:
    """Each part and the sum in fp32, over the memory's bandwidth, and half a floor more."""
    slow = chip(memory_bandwidth=1e9)
    took = gemm_seconds(spec(split_k=True, floor=1e-4, memory=0.5), slow, Gemm(128, 64, 64 * 32))[0]
    by_split = [32 / n * TILE_S + (4 * 128 * 64 * (n + 1) / 5e8 + 5e-5 if n > 1 else 0) for n in (1, 2, 4)]
    assert took == pytest.approx(min(by_split) + 1e-4, rel=1e-3)
    assert min(by_split) == by_split[2]
