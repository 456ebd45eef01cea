"""What libraries do with a transfer, and how sure a time is: pure rules, each as a table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distsim.cluster import load_cluster
from distsim.collectives import Compiler, Transfer
from distsim.collectives.libraries.gloo import compile_gloo, compile_mpi, each_of, progress_bytes, shares
from distsim.collectives.libraries.nccl import NcclSelector
from distsim.collectives.uncertainty import (
    FITTED,
    LEFT_OUT,
    OTHERS,
    OWN,
    Interval,
    around,
    interval,
    node_class,
    size_class,
)
from distsim.errors import UsageError

MIB = 1 << 20


def nccl(
    net: str = "ib", capability: int = 90, cpu: str = "intel", version: tuple[int, int] = (2, 30), **node: Any
) -> Any:
    """As much of NCCL on a cluster as these rules read."""
    fields = {"ranks_per_node": 8, "num_nics": 8, "nic_spec_bytes_per_s": 50e9, "pcie_generation": 5, **node}
    return SimpleNamespace(
        numbers=version,
        cluster=SimpleNamespace(
            nccl=SimpleNamespace(net=net, compute_capability=capability, cpu_vendor=cpu, cpu_class=""),
            node=SimpleNamespace(**fields),
            cpu=SimpleNamespace(num_sockets=node.get("sockets", 1)),
        ),
        timing=SimpleNamespace(constants={("p2p", "channel_GBps"): 2.0, ("p2p", "net_channel_GBps"): 1.0}),
    )


def group(size: int, domains: int = 1) -> Any:
    return SimpleNamespace(size=size, domains=[[]] * domains)


@pytest.mark.parametrize(
    ("net", "capability", "domains", "tuned"),
    [
        ("efa", 90, 2, True),
        ("efa", 90, 1, False),
        ("efa", 80, 2, False),
        ("efa", 89, 2, False),
        ("ib", 90, 2, False),
        ("efa", 100, 3, True),
    ],
)
def test_where_a_tuner_chooses(net: str, capability: int, domains: int, tuned: bool) -> None:
    """Between nodes on EFA, from Hopper on."""
    assert NcclSelector.tuned(nccl(net, capability), group(16, domains)) is tuned


# --- gloo and MPI


@pytest.mark.parametrize(
    ("op", "nbytes"),
    [("all_reduce", 1200.0), ("all_gather", 600.0), ("reduce_scatter", 600.0), ("all_to_all", 200.0),
     ("broadcast", 1600.0), ("gather", 800.0), ("sendrecv", 800.0)],
)  # fmt: skip
def test_bytes_of_all_rounds(op: str, nbytes: float) -> None:
    """Of 800 bytes on four ranks."""
    assert progress_bytes(op, 4, 800.0) == nbytes
    assert progress_bytes("broadcast", 5, 800.0) == 2400.0


def test_shares_of_the_busiest_rank() -> None:
    """What it sends or receives, in units of the largest message."""
    assert shares({(0, 1): 4.0, (0, 2): 2.0, (1, 2): 1.0}) == 1.5
    assert shares({(0, 2): 4.0, (1, 2): 4.0, (1, 0): 1.0}) == 2.0
    assert shares({}) == 0.0
    cpu: Any = SimpleNamespace(cluster=SimpleNamespace(cpu=SimpleNamespace(loopback_bytes_per_s=12.0)))
    assert [each_of(cpu, peers) for peers in (0, 1, 3)] == [12.0, 12.0, 4.0]


ALGORITHMS = {
    # operation -> of gloo, of MPI with a byte, and with a MiB
    "all_reduce": ("ring", "recursive doubling", "ring"),
    "all_gather": ("ring", "ring", "ring"),
    "reduce_scatter": ("ring", "ring", "ring"),
    "broadcast": ("binomial", "binomial", "binomial"),
    "reduce": ("ring + gather", "binomial", "binomial"),
    "gather": ("direct", "linear", "linear"),
    "scatter": ("direct", "linear", "linear"),
    "all_to_all": ("direct", "pairwise", "pairwise"),
    "sendrecv": ("send", "send", "send"),
    "send": ("send", "send", "send"),
    "barrier": ("dissemination", "recursive doubling", "recursive doubling"),
}


@pytest.mark.parametrize("op", ALGORITHMS)
def test_algorithms_of_gloo_and_mpi(op: str) -> None:
    """By operation, and for MPI's all_reduce by size; a group of one has none."""
    cluster = load_cluster("ethernet-cpu:2")
    compiler = Compiler(cluster)
    members = compiler.group(tuple(cluster.devices[:3]), 0)
    alone = compiler.group(tuple(cluster.devices[:1]), 0)
    plans = [compile_gloo(members, op, MIB, 0, None), *(compile_mpi(members, op, n, 0, None) for n in (1, MIB))]
    assert tuple(plan.algo for plan in plans) == ALGORITHMS[op]
    assert [compile(alone, op, MIB, 0, None).algo for compile in (compile_gloo, compile_mpi)] == ["none"] * 2
    assert [compile_mpi(members, "all_reduce", n, 0, None).algo for n in (9_999, 10_000)] == [
        "recursive doubling",
        "ring",
    ]


def test_a_group_of_one_moves_nothing() -> None:
    """And a root is one of the group."""
    cluster = load_cluster("dgx-h100:1")
    for compiler in (Compiler(cluster), Compiler(cluster, nccl_version="ideal")):
        plan = compiler.compile(Transfer("all_reduce", "nccl", tuple(cluster.devices[:1]), MIB))
        assert (plan.algo, plan.phases) == ("none", ())
        assert compiler.compile(Transfer("all_reduce", "nccl", tuple(cluster.devices[:2]), MIB)).algo != "none"
        with pytest.raises(UsageError, match="a root from 0 to 1, got 2"):
            compiler.compile(Transfer("broadcast", "nccl", tuple(cluster.devices[:2]), MIB, root=2))


@pytest.mark.parametrize("algo", ["one_shot", "two_shot", "multimem"])
def test_kernels_on_symmetric_memory(algo: str) -> None:
    """A round trip for each time that ranks meet; two phases for reduce and gather, each rank with its share."""
    cluster = load_cluster("dgx-h100:1")
    compiler, devices = Compiler(cluster), tuple(cluster.devices)

    def plan(op: str) -> Any:
        return compiler.compile(Transfer(op, algo, devices, 8 * MIB))

    round_s = plan("barrier").floor_s
    phases, rounds, nbytes = {"one_shot": (1, 3, 8 * MIB), "two_shot": (2, 5, MIB), "multimem": (1, 3, None)}[algo]
    whole = plan("all_reduce")
    assert len(whole.phases) == phases
    assert whole.floor_s == pytest.approx(rounds * round_s)
    assert nbytes is None or {one.progress_bytes for one in whole.phases} == {nbytes}
    scattered = plan("reduce_scatter")
    assert scattered.floor_s == pytest.approx(3 * round_s)
    assert algo == "multimem" or [one.progress_bytes for one in scattered.phases] == [MIB]
    sent = compiler.compile_send(devices[0], devices[1], MIB, algo, 0)
    assert (sent.channels, [one.progress_bytes for one in sent.phases]) == (0, [MIB])
    if algo != "multimem":
        with pytest.raises(UsageError, match="on symmetric memory, got broadcast"):
            plan("broadcast")


# --- how sure a time is


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "< 64 KiB"),
        (65535, "< 64 KiB"),
        (65536, "64 KiB - 16 MiB"),
        (16 * MIB, "64 KiB - 16 MiB"),
        (16 * MIB + 1, "> 16 MiB"),
    ],
)
def test_classes_of_sizes(nbytes: float, text: str) -> None:
    """16 MiB are in the middle."""
    assert size_class(nbytes) == text


def test_classes_of_nodes() -> None:
    """As tables were measured."""
    classes = {nodes: node_class(nodes) for nodes in (1, 2, 3, 31, 32, 1 << 30)}
    assert list(classes.values()) == ["1 node", "2 nodes", "3 to 31", "3 to 31", "32 and more", "32 and more"]


@pytest.mark.parametrize(
    ("fabric", "origin", "basis"),
    [
        ("none", OWN, "this cluster's logs, inside a node, 1 node"),
        (OTHERS, LEFT_OUT, "machines left out of the fit, all fabrics but InfiniBand, 1 node"),
        ("ib", FITTED, "this machine's tables, ib, 1 node"),
    ],
)
def test_the_basis_of_an_interval(fabric: str, origin: str, basis: str) -> None:
    """Whose errors they are."""
    one = Interval(1.0, 2.0, origin, fabric, "1 node", "> 16 MiB")
    assert (one.basis, one.borrowed) == (basis, fabric == OTHERS)


def test_whose_errors_a_cluster_has() -> None:
    """Its own if it is among the fitted, else those of machines left out in its fabric, else those of others."""
    size = "> 16 MiB"
    origins = {name: around(name, "ib", "2 nodes", size, 1.0) for name in ("snellius-h100:2", "", "dgx-h100")}
    assert {name: one and (one.origin, one.fabric) for name, one in origins.items()} == {
        "snellius-h100:2": (FITTED, "ib"),
        "": (LEFT_OUT, "ib"),
        "dgx-h100": (LEFT_OUT, "ib"),
    }
    unknown = around("", "carrier pigeons", "2 nodes", size, 2.0)
    known = around("", "carrier pigeons", "2 nodes", size, 1.0)
    assert unknown is not None
    assert known is not None
    assert (unknown.fabric, unknown.low_s, unknown.high_s) == (OTHERS, 2 * known.low_s, 2 * known.high_s)
    assert 0.0 < unknown.low_s <= unknown.high_s
    cluster = load_cluster("dgx-h100:2")
    assert interval(cluster, MIB, 2, 1.0, "gloo") is None
    inside = interval(cluster, MIB, 1, 1.0)
    assert inside is not None
    assert (inside.fabric, inside.nodes) == ("none", "1 node")
    between = interval(cluster, MIB, 2, 1.0)
    assert between is not None
    assert (between.fabric, between.nodes, between.size) == ("ib", "2 nodes", "64 KiB - 16 MiB")
    assert interval(load_cluster("ethernet-cpu:2"), MIB, 2, 1.0) is None


@pytest.mark.parametrize(
    ("logged", "op", "own"),
    [((), "broadcast", True), (("all_reduce",), "all_reduce", True), (("all_reduce",), "all_gather", False),
     (("all_reduce_perf",), "all_reduce_coalesced", True), (("sendrecv",), "send", True),
     (("nothing known",), "nothing known", True),
     (("all_gather", "all_reduce"), "all_reduce", True)],
)  # fmt: skip
def test_the_errors_of_a_clusters_own_logs(logged: tuple[str, ...], op: str, own: bool) -> None:
    """Of the operations that they have, by whatever name; of all if they name none."""
    cluster: Any = SimpleNamespace(
        name="mine",
        nccl=SimpleNamespace(version="2.30.3", net="ib"),
        node=SimpleNamespace(num_gpus=8, nvlink_domain_nodes=1),
        errors={"2 nodes, > 16 MiB": (0.5, 3.0, logged)},
    )
    one = interval(cluster, 17 * MIB, 2, 2.0, op=op)
    assert one is not None
    assert (one.origin == OWN) is own
    assert not own or (one.low_s, one.high_s) == (1.0, 6.0)
