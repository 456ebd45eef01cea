"""More nodes are never quicker for the same buffer, by whatever algorithm."""

from __future__ import annotations

from itertools import pairwise

import pytest

from distsim.cluster import Cluster, load_cluster, preset_names
from distsim.collectives import OPS, Compiler, Transfer
from tests.cluster.made import made
from tests.kin import one_in

NODES = (2, 3, 4, 8, 24)
"""An odd number among them: where each GPU has a NIC, rings swap rails between neighbours, and the last node of an odd
number sends to another rail."""
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


VARIANTS = ("polaris:setup1", "polaris:setup2", "polaris:setup5")
"""Sockets, and messages that the host matches."""


@pytest.mark.parametrize("name", [*one_in(6, preset_names()), *one_in(3, VARIANTS)])
def test_on_every_preset(name: str) -> None:
    """From two nodes on, every operation by every algorithm and protocol; which of them NCCL takes is by what it
    believes, and that may well be wrong on more nodes."""
    never_quicker([load_cluster(f"{name}:{count}") for count in NODES])


def test_where_switches_reduce() -> None:
    """NVLS over InfiniBand SHARP has a network to cross, too."""
    never_quicker([made(nodes=count, node={"nic": {"collnet": True}}) for count in NODES])


@pytest.mark.parametrize("flavour", ["gloo", "mpi"])
@pytest.mark.parametrize("op", ["gather", "scatter", "all_to_all", "reduce", "all_reduce", "all_gather"])
def test_sockets_are_no_quicker_through_a_nic_than_inside_a_node(op: str, flavour: str) -> None:
    """One buffer, on one node and on two with 100 Gb/s: a rank's thread copies the bytes of all its peers."""
    seconds = []
    for count in (1, 2, 4):
        cluster = load_cluster(f"ethernet-cpu-100g:{count}")
        compiler, devices = Compiler(cluster), tuple(cluster.devices)
        nbytes = (1 << 30) // (len(devices) if op in ("gather", "scatter") else 1)
        seconds.append(compiler.compile(Transfer(op, flavour, devices, nbytes)).alone_s(compiler.links.capacity))
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("name", ["aws-p5", "gcp-a3high"])
@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8])
def test_a_tuned_network_takes_no_longer_for_less(name: str, nodes: int) -> None:
    """A tuner plugin knows its machine, one algorithm with one protocol has no thresholds: no size takes noticeably
    longer than a larger one."""
    cluster = load_cluster(f"{name}:{nodes}")
    compiler, devices = Compiler(cluster), tuple(cluster.devices)
    seconds = [
        compiler.compile(Transfer("all_reduce", "nccl", devices, 1 << power)).alone_s(compiler.links.capacity)
        for power in range(10, 31)
    ]
    for less, more in pairwise(seconds):
        assert less < 1.02 * more
