"""Clusters and settings of NCCL that no measured table covers behave as arithmetic has it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from distsim.cluster import Cluster
from distsim.network.bench import BenchRow, bench
from tests.cluster.made import made

SIZES = [1 << power for power in range(10, 33, 2)]
CONFIGURATIONS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "algorithm": ("dgx-h100", 4, {"nccl": {"settings": {"NCCL_ALGO": "Tree"}}}),
    "protocol": ("dgx-h100", 4, {"nccl": {"settings": {"NCCL_PROTO": "LL"}}}),
    "no NVLS": ("dgx-h100", 2, {"nccl": {"settings": {"NCCL_NVLS_ENABLE": "0"}}}),
    "few channels": ("dgx-h100", 4, {"nccl": {"settings": {"NCCL_MAX_CTAS": "4"}}}),
    "one NIC": ("dgx-h100", 2, {"node": {"nic": {"count": 1}}}),
    "four GPUs": ("dgx-h100", 4, {"node": {"gpus": 4, "nic": {"count": 4}}}),
    "slow RoCE": ("dgx-a100", 4, {"node": {"nic": {"net": "roce", "bandwidth": "100Gbps", "count": 1}}}),
    "PCIe": ("pcie-4090", 1, {"node": {"gpu": {"model": "a100-pcie", "compute_capability": 80}}}),
}
OPS = ("all_reduce", "all_gather", "alltoall")


def of(name: str) -> Cluster:
    """The cluster of that name in `CONFIGURATIONS`."""
    base, nodes, tables = CONFIGURATIONS[name]
    return made(base, nodes, **tables)


def links_s(op: str, cluster: Cluster, row: BenchRow) -> float:
    """Seconds that the NICs of a node need at least for what has to cross them."""
    nodes, node = cluster.num_nodes, cluster.node
    if nodes == 1:
        return 0.0
    crossing = row.size_bytes * (nodes - 1) / nodes
    if op == "all_reduce":  # what a node has is sent and what it lacks received, both of sums
        crossing *= 2.0
    elif op == "alltoall":
        crossing /= nodes
    return crossing / (node.num_nics * node.nic_spec_bytes_per_s)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_times_are_monotone_and_within_the_links(name: str) -> None:
    """No time falls with size but at a change of algorithm or protocol, none grows by more than 1.5 times as much as
    the size, and none is below what the NICs need."""
    cluster = of(name)
    for op in OPS:
        rows = bench(op, cluster, SIZES)
        for less, more in pairwise(rows):
            if less.way == more.way:
                assert more.time_us >= 0.999 * less.time_us
            assert more.time_us <= 1.5 * (more.size_bytes / less.size_bytes) * less.time_us
        for row in rows:
            assert row.time_us >= 1e6 * links_s(op, cluster, row)
