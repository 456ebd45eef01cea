"""More nodes are never quicker for the same buffer, by whatever algorithm."""

from __future__ import annotations

import pytest

from distsim.cluster import Cluster, load_cluster, preset_names
from distsim.collectives import OPS, Compiler, Transfer
from tests.cluster.made import made
from tests.kin import one_in

NODES = (2, 4, 8, 24)
"""Even: where each GPU has a NIC, rings swap rails between neighbours; of an odd number of nodes two do not."""
SIZES = (1 << 10, 1 << 20, 1 << 30)


def times(cluster: Cluster) -> dict[tuple[str, int, str, str], float]:
    """Seconds of every operation, size, algorithm and protocol that there is here."""
    compiler, devices = Compiler(cluster), tuple(cluster.devices)
    flavour = "nccl" if cluster.node.num_gpus else "gloo"
    found = {}
    for op in OPS:
        for size in SIZES:
            share = size // len(devices) if op in ("gather", "scatter") else size
            for row in compiler.explain(Transfer(op, flavour, devices, share)):
                if row.predicted_s is not None:
                    found[op, size, row.algo, row.proto] = row.predicted_s
    return found


def never_quicker(clusters: list[Cluster]) -> None:
    """Each one's times are at least those of the one before."""
    before = times(clusters[0])
    for cluster in clusters[1:]:
        now = times(cluster)
        quicker = {
            what: (before[what], now[what]) for what in before.keys() & now if now[what] < 0.999999 * before[what]
        }
        assert quicker == {}, cluster
        before |= now


@pytest.mark.parametrize("name", one_in(6, preset_names()))
def test_on_every_preset(name: str) -> None:
    """From two nodes on, every operation by every algorithm and protocol; which of them NCCL takes is by what it
    believes, and that may well be wrong on more nodes."""
    never_quicker([load_cluster(f"{name}:{count}") for count in NODES])


def test_where_switches_reduce() -> None:
    """NVLS over InfiniBand SHARP has a network to cross, too."""
    never_quicker([made(nodes=count, node={"nic": {"collnet": True}}) for count in NODES])
