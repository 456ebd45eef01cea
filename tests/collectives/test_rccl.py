"""RCCL's own choices on MI300X and MI355X, and what they cost."""

from __future__ import annotations

import numpy as np
import pytest

from distsim.cluster import load_cluster
from distsim.collectives import Compiler, Plan, Transfer
from distsim.collectives.algorithms.tree import tree_loads

KIB, MIB = 1 << 10, 1 << 20


def plan(preset: str, nbytes: int, op: str = "all_reduce", version: str | None = None) -> tuple[Plan, float]:
    """The plan of a collective over all GPUs of a preset, and microseconds."""
    cluster = load_cluster(preset)
    compiler = Compiler(cluster, nccl_version=version)
    made = compiler.compile(Transfer(op, "nccl", tuple(cluster.devices), nbytes))
    return made, made.alone_s(compiler.links.capacity) * 1e6


@pytest.mark.parametrize(
    ("preset", "op", "nbytes", "chosen"),
    [
        ("mi300x:1", "all_reduce", 512, "Ring LL"),
        ("mi300x:1", "all_reduce", KIB, "MSCCL LL"),
        ("mi300x:1", "all_reduce", 512 * KIB, "MSCCL Simple"),
        ("mi300x:1", "all_reduce", 32 * MIB, "Ring Simple"),
        ("mi355x:1", "all_reduce", 256 * KIB, "Ring LL"),
        ("mi355x:2", "all_reduce", 128 * KIB - 1, "Tree LL"),
        ("mi355x:2", "all_reduce", 128 * KIB, "Tree LL128"),
        ("mi355x:2", "all_reduce", 32 * MIB, "Tree Simple"),
        ("mi355x:4", "all_reduce", 32 * MIB, "Tree LL128"),
        ("mi355x:2", "all_reduce", 128 * MIB, "Tree Simple"),
        ("mi355x:2", "all_reduce", 256 * MIB, "Ring Simple"),
        ("mi355x:2", "all_gather", 16 * 8 * MIB, "Ring LL128"),
        ("mi355x:2", "all_gather", 16 * 16 * MIB, "Ring Simple"),
        ("mi355x:2", "reduce_scatter", 16 * (128 * KIB - 1), "Ring LL"),
        ("mi355x:2", "reduce_scatter", 16 * 4 * MIB, "Ring LL128"),
        ("mi355x:2", "reduce_scatter", 16 * 4 * MIB + 16, "Ring Simple"),
        ("mi355x:2", "broadcast", 32 * KIB, "Ring LL"),
    ],
)
def test_choices(preset: str, op: str, nbytes: int, chosen: str) -> None:
    """What RCCL's tables, its ranges a rank and MSCCL's files say (ROCm/rccl, tuning.cc, rccl_wrap.cc)."""
    made, _ = plan(preset, nbytes, op)
    assert f"{made.algo} {made.proto}" == chosen


@pytest.mark.parametrize(
    ("version", "nbytes", "chosen"),
    [
        ("2.21.5", 4 * MIB, "Tree Simple"),
        ("2.21.5", 256 * MIB, "Tree Simple"),
        ("2.22.3", 256 * MIB, "Ring Simple"),
        ("2.26.6", 4 * MIB, "Tree LL128"),
        ("2.26.6", MIB, "Tree LL"),
    ],
)
def test_choices_by_release(version: str, nbytes: int, chosen: str) -> None:
    """LL128 and ranges of protocols came with 2.25; where a ring begins between two nodes moved before."""
    made, _ = plan("mi300x:2", nbytes, version=version)
    assert f"{made.algo} {made.proto}" == chosen


@pytest.mark.parametrize(("nbytes", "chosen"), [(3211264, "Ring LL128"), (3211265, "Ring Simple")])
def test_ranges_of_an_mi300x(nbytes: int, chosen: str) -> None:
    """Bytes a rank at which a reduce_scatter leaves LL128 (same sources)."""
    made, _ = plan("mi300x:2", 16 * nbytes, "reduce_scatter", version="2.26.6")
    assert f"{made.algo} {made.proto}" == chosen


@pytest.mark.parametrize(
    ("mebibytes", "measured_us", "within"),
    [
        (4, 337.9, 0.2),
        (16, 497.3, 0.2),
        (64, 821.9, 0.2),
        (128, 1448.8, 0.08),
        (256, 1713.4, 0.05),
        (16384, 90115, 0.05),
    ],
)
def test_two_nodes_of_mi300x_to_which_nothing_was_fitted(mebibytes: int, measured_us: float, within: float) -> None:
    """rccl-tests of 2 nodes (hisohara/ai-scripts at 7b8b1ec): a tree, first in one piece, a ring from 256 MiB on."""
    _, us = plan("mi300x:2", mebibytes * MIB)
    assert us == pytest.approx(measured_us, rel=within)


@pytest.mark.parametrize(
    ("kibibytes", "measured_us"), [(64, 14.25), (256, 17.46), (1024, 28.39), (4096, 52.96), (16384, 149.9)]
)
def test_all_pairs_of_eight_mi300x(kibibytes: int, measured_us: float) -> None:
    """MSCCL's two exchanges take a third of what fourteen steps of a ring in Simple would (same source)."""
    _, us = plan("mi300x:1", kibibytes * KIB)
    assert us == pytest.approx(measured_us, rel=0.2)


@pytest.mark.parametrize("preset", ["mi300x:1", "mi300x:2", "polaris:2"])
def test_trees_use_all_pairs_of_a_mesh(preset: str) -> None:
    """Chains from all heads use the links of each pair alike."""
    cluster = load_cluster(preset)
    group = Compiler(cluster).group(tuple(cluster.devices), 0)
    loads = tree_loads(group)
    pairs = cluster.links.are(("nvlink",))[loads.links]
    if preset != "polaris:2":  # two NICs for four GPUs: heads are not all of them
        assert pairs.sum() == cluster.num_nodes * 56
        assert np.ptp(loads.weights[pairs]) < 1e-9
    assert pairs.sum() > cluster.num_nodes * 3
