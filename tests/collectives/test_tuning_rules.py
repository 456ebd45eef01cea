"""What NCCL and RCCL believe, open and read from settings: each rule by hand on a machine of round figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distsim.cluster.graph.link import NcclFacts
from distsim.collectives.constants import Constants
from distsim.collectives.libraries.nccl_channels import (
    ChannelSettings,
    host_copy_bytes,
    searched,
    sent_channels,
    tree_parts,
    tree_piece_bytes,
)
from distsim.collectives.libraries.nccl_timing import fabric_table
from distsim.collectives.libraries.nccl_tuning import ALGORITHMS, PROTOCOLS, Candidate, Machine, candidates
from distsim.collectives.libraries.rccl_tuning import model_of, ranged_protocol, rccl_candidates
from distsim.collectives.uncertainty import beyond_measured_racks
from distsim.errors import UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def machine(nodes: int = 1, per_node: int = 8, **changes: Any) -> Machine:
    """Nodes of eight H100 on Intel, 8 channels of 48 GB/s each, with all that NCCL 2.30 has."""
    fields: dict[str, Any] = {
        "num_ranks": nodes * per_node,
        "num_nodes": nodes,
        "generation": 2,
        "intra": "nvlink",
        "intra_gbps": 450.0,
        "graph_channels": 8,
        "ring_gbps": 48.0,
        "tree_gbps": 48.0,
        "channels": 16,
        "nvls": True,
        "nvls_channels": 16,
        "net_us": 0.0,
        "ll128": True,
        "amd": False,
        "collnet": False,
    }
    return Machine(**{**fields, **changes})


def candidate(every: list[Candidate], algo: str, proto: str) -> Candidate:
    return next(one for one in every if (one.algo, one.proto) == (algo, proto))


def believed_us(op: str, nbytes: float, algo: str, proto: str, on: Machine) -> float:
    """The library's estimate of a choice that is allowed."""
    every = (rccl_candidates if on.rccl else candidates)(op, nbytes, on)
    us = candidate(every, algo, proto).believed_us
    assert us is not None
    return us


ALONE, PAIR, FOUR = machine(), machine(2), machine(4)
LATENCY_US = [
    # op, algorithm, protocol, machine, base + steps
    ("all_reduce", "Ring", "LL", ALONE, 6.6 + 14 * 0.6, "2 (n - 1) steps over NVLink"),
    ("all_reduce", "Ring", "LL128", ALONE, 14.0 + 14 * 1.9, "a protocol has its own step"),
    ("all_reduce", "Ring", "Simple", ALONE, 8.4 + 14 * 3.4, "a protocol has its own step"),
    ("all_gather", "Ring", "LL", ALONE, 6.6 + 7 * 0.6, "n - 1 steps"),
    ("broadcast", "Ring", "LL", ALONE, 6.6 + 0.6, "a chain: one step"),
    ("reduce", "Ring", "LL", PAIR, 6.6 + 2.7, "a chain: one step between nodes"),
    ("all_reduce", "Ring", "LL", machine(intra="pci"), 6.6 + 14 * 1.0, "a step over PCIe"),
    ("all_reduce", "Ring", "LL", PAIR, 6.6 + 28 * 1.0 + 2 * 2.7, "two steps between nodes, the others at least 1 us"),
    ("all_reduce", "Ring", "LL", machine(2, amd=True), 6.6 + 28 * 2.0 + 2 * 2.7, "at least 2 us on AMD"),
    ("all_reduce", "Ring", "Simple", machine(2, amd=True), 8.4 + 28 * 6.0 + 2 * 14.0, "three times that in Simple"),
    ("all_reduce", "Ring", "LL", machine(2, version=(2, 21)), 6.6 + 26 + 4 * 2.7, "2 nodes were 4 steps before 2.23"),
    ("all_gather", "Ring", "LL", PAIR, 6.6 + 14 * 1.0 + 2.7, "one step between two nodes"),
    ("all_gather", "Ring", "LL", machine(4, 1), 6.6 + 3 * 5.0, "one GPU a node: no step is hidden behind NVLink's"),
    ("all_gather", "Ring", "LL", machine(4, 1, version=(2, 22)), 6.6 + 3 * 2.7, "which 2.23 brought"),
    ("all_reduce", "Tree", "LL", ALONE, 6.8 + 2 * 7 * 0.6, "up and down a chain of eight"),
    ("all_reduce", "Tree", "LL", PAIR, 6.8 + 2 * (7 * 0.6 + 5.0), "a tree of two nodes is one deep"),
    ("all_reduce", "Tree", "LL", machine(3), 6.8 + 2 * (7 * 0.6 + 5.0), "and so is one of three"),
    ("all_reduce", "Tree", "LL", FOUR, 6.8 + 2 * (7 * 0.6 + 2 * 5.0), "of four nodes two deep"),
    ("all_reduce", "Tree", "LL", machine(2, net_us=35.0), 6.8 + 2 * (7 * 0.6 + 40.0), "a plugin's latency"),
    ("all_reduce", "Tree", "Simple", machine(2, net_us=35.0), 8.4 + 2 * (7 * 4.0 + 84.0), "twice in Simple"),
    ("all_reduce", "NVLS", "Simple", ALONE, 25.0, "one step"),
    ("all_reduce", "NVLS", "Simple", machine(version=(2, 18)), 23.0, "a base before 2.19"),
    ("all_reduce", "NVLS", "Simple", machine(version=(2, 17)), 40.0, "a larger one before 2.18"),
    ("all_reduce", "NVLS", "Simple", machine(2, collnet=True), 25.0 + 18.0, "and the fabric's switches"),
    ("all_reduce", "NVLSTree", "Simple", PAIR, 25.0 + 2 * 20.9, "up and down one hop"),
    ("all_gather", "PAT", "Simple", machine(4, 1), 8.0 + 2 * 14.0 / 3.5 + 2.8 * 4, "log2 of 4 rounds, and each rank"),
    ("broadcast", "Ring", "LL", machine(2, intra="pci"), 6.6 + 2.7, "between nodes PCIe counts for nothing"),
]


@pytest.mark.parametrize(("op", "algo", "proto", "on", "us", "reason"), LATENCY_US)
def test_latency_that_nccl_believes(op: str, algo: str, proto: str, on: Machine, us: float, reason: str) -> None:
    """Of no bytes, by the formulas of tuning.cc."""
    assert believed_us(op, 0, algo, proto, on) == pytest.approx(us), reason


SLOW = {"ring_gbps": 20.0, "tree_gbps": 20.0}
GBPS = [
    ("all_reduce", "Ring", "Simple", ALONE, 384 * 8 / 14, "a buffer goes 14 / 8 times round"),
    ("all_gather", "Ring", "Simple", ALONE, 384 * 8 / 7, "7 / 8 times"),
    ("broadcast", "Ring", "Simple", ALONE, 384, "once"),
    ("all_reduce", "Ring", "LL", ALONE, 141 * 8 / 14, "LL's maximum on one Hopper node"),
    ("all_reduce", "Ring", "LL", machine(**SLOW), 80 * 8 / 14, "half of the channels' rate below it"),
    ("all_gather", "Ring", "LL", machine(version=(2, 19), **SLOW), 160 / 3 * 8 / 7, "a third where nothing is added"),
    ("reduce", "Ring", "LL", machine(version=(2, 19), **SLOW), 40, "a quarter where something is, before 2.21"),
    ("all_gather", "Ring", "LL", machine(2, version=(2, 19), **SLOW), 39 * 16 / 15, "between nodes LL's maximum"),
    ("all_reduce", "Ring", "LL", PAIR, 39 * 16 / 30, "between nodes Intel's row"),
    ("all_reduce", "Ring", "LL", machine(2, amd=True), 22.5 * 16 / 30, "between nodes AMD's row"),
    ("all_reduce", "Ring", "LL", FOUR, 20.4 * 32 / 62, "the last column is of three nodes and more"),
    ("all_reduce", "Ring", "LL128", ALONE, 8 * 36.7 * 8 / 14, "what a channel carries in LL128"),
    ("all_reduce", "Ring", "LL128", machine(**SLOW), 160 * 0.92 * 8 / 14, "0.92 of slower channels"),
    ("all_reduce", "Tree", "Simple", ALONE, 8 * 38.7 * 0.5, "what a channel carries in a tree"),
    ("all_reduce", "Tree", "Simple", machine(**SLOW), 160 * 0.92 * 0.5, "0.92 of slower channels"),
    ("all_reduce", "Tree", "LL", ALONE, 8 * 38.7 / 3.8 * 0.5, "LL has 1 / 3.8 of it"),
    ("all_reduce", "Tree", "LL", PAIR, 39 * 0.5, "and no more than LL's maximum"),
    ("all_reduce", "Tree", "LL128", ALONE, 8 * 38.7 * 7 / 9 * 0.5, "7 / 9 inside a node"),
    ("all_reduce", "Tree", "LL128", machine(2, **SLOW), 160 * 0.92 * 15 / 16 * 0.5, "15 / 16 between nodes"),
    ("all_reduce", "Tree", "LL128", PAIR, 8 * 36.7 * 0.5, "and no more than a channel's maximum"),
    ("all_reduce", "Tree", "Simple", machine(2, simple_tree=True), 8 * 41.4 * 0.85 * 0.5, "0.85 by one NIC"),
    ("all_reduce", "Tree", "Simple", machine(simple_tree=True), 8 * 38.7 * 0.5, "not inside a node"),
    ("all_reduce", "NVLS", "Simple", ALONE, 2 * 450 * 0.85 * 15 / 16 * 8 / 14, "both ways, less one head"),
    ("all_gather", "NVLS", "Simple", ALONE, 450 * 0.85 * 15 / 16, "a GPU's own part does not move"),
    ("all_reduce", "NVLS", "Simple", machine(2, collnet=True), 384 * 16 / 30, "as slow as the NICs"),
    ("all_reduce", "NVLSTree", "Simple", PAIR, 8 * 57.7 * 16 / 30, "its known maximum on two nodes"),
    ("all_reduce", "NVLSTree", "Simple", machine(2, **SLOW), 2 * 160 * 16 / 30, "both ways between two nodes"),
    ("all_reduce", "NVLSTree", "Simple", machine(3, **SLOW), 160 * 24 / 46, "one way between more"),
    ("all_reduce", "NVLSTree", "Simple", machine(2, version=(2, 27)), 384 * 5 / 6, "a ring's before 2.28"),
    ("all_reduce", "NVLSTree", "Simple", machine(3, version=(2, 27)), 192 * 5 / 6, "half of it on three nodes"),
    ("all_reduce", "NVLS", "Simple", machine(version=(2, 27)), 450 * 5 / 6, "the NVLinks' before 2.28"),
    ("all_gather", "PAT", "Simple", machine(4, 1), 384 * 0.75, "three quarters of a ring's"),
    ("all_gather", "PAT", "Simple", machine(4, 1, version=(2, 23)), 384 * 0.85, "0.85 in 2.23"),
]


@pytest.mark.parametrize(("op", "algo", "proto", "on", "gbps", "reason"), GBPS)
def test_bandwidth_that_nccl_believes(op: str, algo: str, proto: str, on: Machine, gbps: float, reason: str) -> None:
    """Between 1 and 2 GiB, where no size is corrected."""
    us = [believed_us(op, nbytes, algo, proto, on) for nbytes in (GIB, 2 * GIB)]
    assert GIB / (us[1] - us[0]) / 1000 == pytest.approx(gbps), reason


CORRECTIONS = [
    ("LL", 63, 1.0, "less than the first"),
    ("LL", 64 << 3, 1.0, "512 bytes"),
    ("LL", (64 << 5) - 1, 0.9, "up to the next power of two"),
    ("LL", 64 << 12, 0.4, "256 KiB"),
    ("LL128", 64 << 4, 1.0, "1 KiB"),
    ("LL128", 64 << 17, 0.9, "8 MiB"),
    ("Simple", 64, 0.9, "the first"),
    ("Simple", 64 << 7, 0.8, "8 KiB"),
    ("Simple", 64 << 12, 0.5, "256 KiB"),
    ("Simple", 64 << 18, 0.7, "16 MiB"),
    ("Simple", 64 << 22, 0.9, "256 MiB, the last"),
    ("Simple", 64 << 23, 1.0, "beyond the last"),
]


@pytest.mark.parametrize(("proto", "nbytes", "factor", "reason"), CORRECTIONS)
def test_a_tree_is_corrected_by_its_size(proto: str, nbytes: int, factor: float, reason: str) -> None:
    """By treeCorrectionFactor; NVLSTree too, from 2.29 on, on Blackwell with x86."""

    def factor_of(algo: str, proto: str, on: Machine) -> float:
        bytes_us = believed_us("all_reduce", nbytes, algo, proto, on) - believed_us("all_reduce", 0, algo, proto, on)
        plain_us = (
            believed_us("all_reduce", 2 * GIB, algo, proto, on) - believed_us("all_reduce", GIB, algo, proto, on)
        ) / GIB
        return plain_us * nbytes / bytes_us

    assert factor_of("Tree", proto, PAIR) == pytest.approx(factor, rel=1e-6), reason
    if proto == "Simple":
        changes: list[dict[str, Any]] = [{}, {"x86": False}, {"version": (2, 28)}, {"generation": 2}]
        blackwells = [machine(2, **{"generation": 3, **change}) for change in changes]
        factors = [factor_of("NVLSTree", "Simple", on) for on in blackwells]
        assert factors == pytest.approx([factor, 1.0, 1.0, 1.0], rel=1e-6)


@pytest.mark.parametrize(
    ("generation", "version", "factor"),
    [(0, (2, 30), 1.9), (1, (2, 30), 1.4), (2, (2, 30), 1.4), (3, (2, 30), 1.4), (1, (2, 16), 1.9), (3, (2, 16), 1.5)],
)
def test_a_ring_of_many_bytes_has_a_longer_latency(generation: int, version: tuple[int, int], factor: float) -> None:
    """An all_reduce in Simple between nodes, from 64 bytes for each rank and channel on."""
    on = machine(2, generation=generation, version=version)
    least = 64 * on.channels * on.num_ranks
    for op, nodes, proto, expected in (
        ("all_reduce", 2, "Simple", factor),
        ("all_reduce", 2, "LL", 1.0),
        ("all_gather", 2, "Simple", 1.0),
        ("all_reduce", 1, "Simple", 1.0),
    ):
        at = machine(nodes, generation=generation, version=version, channels=on.channels * 2 // nodes)
        before, first = (believed_us(op, nbytes, "Ring", proto, at) for nbytes in (least - 1, least))
        assert first / before == pytest.approx(expected, rel=0.01), (op, nodes, proto)


EXCLUDED = [
    ("all_reduce", "NVLS", "Simple", machine(version=(2, 16)), "NVLS came with NCCL 2.17"),
    ("all_reduce", "NVLSTree", "Simple", machine(2, version=(2, 17)), "NVLSTree came with NCCL 2.18"),
    ("all_gather", "PAT", "Simple", machine(2, 1, version=(2, 22)), "PAT came with NCCL 2.23"),
    ("all_reduce", "CollNetChain", "Simple", PAIR, "no CollNet plugin in this cluster"),
    ("all_reduce", "CollNetDirect", "Simple", machine(2, collnet=True), "not modelled"),
    ("broadcast", "Tree", "LL", PAIR, "broadcast has a ring only"),
    ("reduce", "NVLS", "Simple", ALONE, "reduce has a ring only"),
    ("all_gather", "Tree", "LL", PAIR, "all_gather has no tree"),
    ("all_gather", "NVLSTree", "Simple", PAIR, "all_gather has no tree"),
    ("all_reduce", "NVLS", "Simple", machine(nvls=False), "no NVLink SHARP here"),
    ("all_reduce", "NVLSTree", "Simple", machine(2, nvls=False), "no NVLink SHARP here"),
    ("all_reduce", "NVLS", "LL", ALONE, "NVLS is Simple only"),
    ("all_gather", "PAT", "LL", machine(4, 1), "PAT is Simple only"),
    ("all_reduce", "NVLS", "Simple", machine(1, 2), "NVLS needs more than 2 ranks"),
    ("all_reduce", "NVLS", "Simple", PAIR, "NVLS between nodes needs CollNet"),
    ("all_reduce", "NVLSTree", "Simple", ALONE, "one node needs no NVLSTree"),
    ("all_reduce", "PAT", "Simple", machine(4, 1), "all_reduce has no PAT"),
    ("all_gather", "PAT", "Simple", machine(2, 2), "PAT needs one GPU per node"),
    ("all_reduce", "Ring", "LL128", machine(ll128=False), "LL128 is not safe on this path"),
    ("all_reduce", "Ring", "LL", machine(graph_channels=0), "no link of this machine carries it"),
]


@pytest.mark.parametrize(("op", "algo", "proto", "on", "why"), EXCLUDED)
def test_choices_that_nccl_does_not_have(op: str, algo: str, proto: str, on: Machine, why: str) -> None:
    """With the reason; nothing else stands in for it."""
    one = candidate(candidates(op, MIB, on), algo, proto)
    assert one.believed_us is None
    assert one.why.startswith(why)


def test_three_ranks_are_enough_for_nvls() -> None:
    """More than two, as NCCL has it; with one GPU a node PAT is there for both of its operations."""
    assert believed_us("all_reduce", MIB, "NVLS", "Simple", machine(1, 3)) > 0
    for op in ("all_gather", "reduce_scatter"):
        assert believed_us(op, MIB, "PAT", "Simple", machine(2, 1)) > 0


# -- channels

SEARCHED = [
    # generation, NVLinks, a NIC, NICs, nodes, release -> found, of a ring, of a tree, opened
    ((2, 450, 50, 8, 1, (2, 21)), (18, 25.0, 25.0, 32), "9 of 50 carry as much as 15 of 30; 50 and more are halved"),
    ((1, 300, 25, 8, 1, (2, 21)), (20, 15.0, 15.0, 32), "10 of 30 carry all; before Hopper 25 and more are halved"),
    ((3, 900, 50, 8, 1, (2, 21)), (20, 45.0, 45.0, 32), "10 of 90"),
    ((2, 5, 50, 8, 1, (2, 21)), (1, 3.0, 3.0, 2), "the quickest that the links can carry"),
    ((2, 2, 50, 8, 1, (2, 21)), (1, 2.0, 2.0, 2), "less than the slowest: the links' own"),
    ((2, 450, 50, 8, 2, (2, 21)), (8, 48.0, 48.0, 16), "one a NIC, 48 of its 50"),
    ((2, 450, 48 / 1.01, 8, 3, (2, 21)), (8, 48.0, 48.0, 16), "one percent over is as much"),
    ((2, 450, 47.5, 8, 3, (2, 21)), (8, 45.0, 45.0, 16), "two are not"),
    (
        (1, 300, 25, 8, 2, (2, 21)),
        (8, 24.0, 30.0, 16),
        "a tree of two nodes up to twice as quick, as the NVLinks allow",
    ),
    ((1, 300, 25, 8, 3, (2, 21)), (8, 24.0, 24.0, 16), "not of three"),
    ((1, 1000, 25, 4, 2, (2, 21)), (4, 24.0, 48.0, 8), "and no more than twice"),
    ((2, 100, 50, 4, 3, (2, 21)), (4, 24.0, 24.0, 8), "no more than a share of the NVLinks"),
    ((2, 450, 100, 1, 2, (2, 21)), (2, 24.0, 24.0, 4), "four channels and fewer of 25 are halved"),
    ((2, 450, 50, 40, 2, (2, 21)), (16, 24.0, 24.0, 32), "16 at most"),
    ((2, 450, 0.05, 1, 3, (2, 21)), (1, 0.12, 0.12, 2), "slower than all: the slowest"),
    ((3, 900, 100, 8, 3, (2, 30)), (16, 48.0, 48.0, 32), "96 a NIC from 2.28 on, halved"),
    ((3, 900, 100, 8, 3, (2, 27)), (8, 47.9, 47.9, 16), "47.9 in 2.27"),
]


@pytest.mark.parametrize(("given", "channels", "reason"), SEARCHED)
def test_channels_that_the_search_finds(given: tuple[Any, ...], channels: tuple[Any, ...], reason: str) -> None:
    """Number, GB/s in a ring and in a tree, and how many are opened."""
    result = searched(*given)
    assert (result.count, result.ring_gbps, result.tree_gbps, result.opened) == channels, reason


SENT = [
    # release, opened, ranks, a NIC, NICs a rank -> channels
    (((2, 18), 16, 8, 50.0, 1.0), 2, "two whatever comes"),
    (((2, 18), 1, 8, 50.0, 1.0), 1, "but no more than there are"),
    (((2, 21), 16, 32, 50.0, 1.0), 2, "all of them in one round: 4 times the channels"),
    (((2, 21), 16, 33, 50.0, 1.0), 1, "one rank too many"),
    (((2, 21), 16, 33, 50.0, 3.0), 4, "one a NIC at least, as a power of two"),
    (((2, 21), 2, 8, 50.0, 4.0), 2, "no more than there are"),
    (((2, 21), 24, 64, 50.0, 0.2), 2, "24 count as 32; a part of a NIC is one"),
    (((2, 29), 16, 8, 50.0, 1.0), 4, "one for each 14 GB/s"),
    (((2, 29), 16, 8, 14.0, 1.0), 2, "two at least"),
    (((2, 29), 16, 8, 57.0, 1.0), 8, "57 GB/s are five, so eight"),
    (((2, 29), 16, 24, 57.0, 1.0), 4, "24 ranks are three at a time"),
    (((2, 29), 16, 1024, 57.0, 1.0), 1, "one at least"),
]


@pytest.mark.parametrize(("given", "channels", "reason"), SENT)
def test_channels_of_a_send(given: tuple[Any, ...], channels: int, reason: str) -> None:
    """To one rank of another node."""
    assert sent_channels(*given) == channels, reason


PIECES = [
    ("LL", ALONE, 100, 32 * KIB, 1, "one channel for the first 4 KiB; a piece of less is in as many parts as it has"),
    ("LL", ALONE, 8 * KIB, 2 * 32 * KIB, 16, "one more for each 4 KiB, and a part for each 256 bytes"),
    ("LL", ALONE, MIB, 16 * 32 * KIB, 128, "16 channels at most"),
    ("LL128", ALONE, 5 * KIB, 18000, 3, "halved until it is no more than 32 KiB"),
    ("LL128", ALONE, 64 * MIB, 16 * 144000, 75, "fewer, larger pieces of many bytes"),
    ("Simple", ALONE, 32 * KIB, 512 * KIB, 1, "a slot for each 32 KiB"),
    ("Simple", ALONE, MIB, 16 * 512 * KIB, 1, "16 channels at most, and never in parts"),
    ("Simple", machine(version=(2, 19)), MIB, 16 * 32 * KIB, 1, "before 2.20 cut to 32 KiB"),
    ("Simple", machine(version=(2, 19)), GIB, 16 * 512 * KIB, 1, "unless there are pieces enough"),
]


@pytest.mark.parametrize(("proto", "on", "nbytes", "piece", "parts", "reason"), PIECES)
def test_pieces_of_a_tree(proto: str, on: Machine, nbytes: int, piece: int, parts: int, reason: str) -> None:
    """Over all channels, and the parts that go on before a piece is complete."""
    assert (tree_piece_bytes(on, nbytes, proto), tree_parts(on, nbytes, proto)) == (piece, parts), reason


# -- settings


def settings(**environment: str) -> ChannelSettings:
    return ChannelSettings.of(environment, ALGORITHMS, PROTOCOLS)


@pytest.mark.parametrize(
    ("environment", "channels", "opened"),
    [
        ({}, 16, 16),
        ({"NCCL_MAX_CTAS": "8"}, 16, 8),
        ({"NCCL_MAX_CTAS": "8", "NCCL_MAX_NCHANNELS": "4"}, 16, 4),
        ({"NCCL_MIN_CTAS": "24"}, 16, 24),
        ({"NCCL_MIN_CTAS": "24", "NCCL_MIN_NCHANNELS": "32"}, 16, 32),
        ({"NCCL_MAX_CTAS": "4", "NCCL_MIN_CTAS": "8"}, 16, 8),
        ({"NCCL_MIN_CTAS": "1"}, 1, 1),
    ],
)
def test_how_many_channels_settings_leave(environment: dict[str, str], channels: int, opened: int) -> None:
    """The smaller maximum, then the larger minimum, by either of their names."""
    assert settings(**environment).opened(channels) == opened


@pytest.mark.parametrize("wrong", ["0", "33", "-1", "x", "²", ""])
def test_numbers_of_channels_that_nccl_does_not_have(wrong: str) -> None:
    """From 1 to 32."""
    with pytest.raises(UsageError, match="NCCL_MAX_CTAS: expected a number of channels from 1 to 32"):
        settings(NCCL_MAX_CTAS=wrong)


def test_other_settings_of_nccl() -> None:
    """A slot is an eighth of the buffer; NVLS is on unless it is 0; choices are left out by name."""
    assert (settings().slot_bytes, settings(NCCL_BUFFSIZE="8").slot_bytes) == (512 * KIB, 1)
    with pytest.raises(UsageError, match="NCCL_BUFFSIZE"):
        settings(NCCL_BUFFSIZE="7")
    assert [settings().nvls, settings(NCCL_NVLS_ENABLE="0").nvls, settings(NCCL_NVLS_ENABLE="2").nvls] == [1, 0, 1]
    tree = settings(NCCL_ALGO="^Ring", NCCL_PROTO="ll128,Simple")
    assert tree.against("Ring", "LL128") == "NCCL_ALGO leaves Ring out"
    assert tree.against("Tree", "LL") == "NCCL_PROTO leaves LL out"
    assert tree.against("Tree", "LL128") == settings().against("Ring", "LL") == ""


def test_bytes_that_the_provider_copies() -> None:
    """None where the variable is not set; a number of at most 18 digits."""
    name = "FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD"
    assert [host_copy_bytes({}), host_copy_bytes({name: "0"}), host_copy_bytes({name: "9" * 18})] == [
        None,
        0,
        10**18 - 1,
    ]
    for wrong in ("9" * 19, "²", "-1", ""):
        with pytest.raises(UsageError, match=name):
            host_copy_bytes({name: wrong})


FABRICS = [
    ({"net": "none"}, (2, 21), "ib", "of one node: whichever"),
    ({"net": "slingshot", "cpu_vendor": "arm"}, (2, 21), "slingshot-grace", "a Grace host is quicker"),
    ({"net": "slingshot"}, (2, 21), "slingshot", "the NIC matches"),
    ({"net": "slingshot", "settings": {"FI_CXI_RX_MATCH_MODE": "software"}}, (2, 21), "slingshot-software", "or not"),
    ({"net": "efa", "compute_capability": 89}, (2, 21), "efa-sendrecv", "before Hopper"),
    ({"net": "efa", "compute_capability": 90}, (2, 21), "efa", "RDMA writes from p5 on"),
    ({"net": "tcp"}, (2, 18), "tcp-before-2_19", "slower sockets"),
    ({"net": "tcp"}, (2, 19), "tcp", "as quick as later"),
    ({"net": "tcp", "settings": {"NCCL_CROSS_NIC": "1"}}, (2, 18), "tcp", "if NICs may differ"),
    ({"net": "roce", "plugin": "gib 1.0"}, (2, 27), "roce-gib", "Google's plugin"),
    ({"net": "roce"}, (2, 27), "roce", "NCCL's own"),
    ({"net": "ib", "compute_capability": 80, "cpu_vendor": "arm"}, (2, 18), "ib", "no rule of another fabric"),
    ({"net": "carrier pigeon"}, (2, 27), "net", "never measured"),
]


@pytest.mark.parametrize(("facts", "version", "table", "reason"), FABRICS)
def test_constants_of_a_fabric(facts: dict[str, Any], version: tuple[int, int], table: str, reason: str) -> None:
    """By the network, the host, the GPUs and the settings."""
    fields: dict[str, Any] = {"version": "", "compute_capability": 90, "cpu_vendor": "intel", "cpu_class": ""}
    fields |= {"num_nics": 1, "nic_bytes_per_s": 1.0, "nic_latency_s": 0.0, "collnet": False}
    constants = Constants({"ib.hop": 1.0, "roce.hop": 1.0, "tcp.hop": 1.0, "efa.hop": 1.0, "slingshot.hop": 1.0})
    assert fabric_table(NcclFacts(**{**fields, **facts}), version, constants) == table, reason


@pytest.mark.parametrize(
    ("span", "nodes", "beyond"), [(1, 999, False), (18, 36, False), (18, 37, True), (2, 4, False), (2, 5, True)]
)
def test_racks_beyond_those_that_were_measured(span: int, nodes: int, beyond: bool) -> None:
    """More than two NVLink domains of several nodes; nodes of their own are no racks."""
    cluster: Any = SimpleNamespace(node=SimpleNamespace(nvlink_domain_nodes=span))
    assert beyond_measured_racks(cluster, nodes) is beyond


# -- RCCL


def amd(nodes: int = 1, per_node: int = 8, **changes: Any) -> Machine:
    """Nodes of eight MI300X, whose seven links carry 48 GB/s each, with RCCL 2.26."""
    return machine(nodes, per_node, **{"rccl": 5, "intra_gbps": 336.0, "version": (2, 26), **changes})


MI250 = {"rccl": 3, "intra_gbps": 100.0}
RCCL_US = [
    # op, algorithm, protocol, machine, bytes -> latency, GB/s
    ("all_reduce", "Ring", "LL", amd(), 1, 12 + 14 * 0.8, 0.08 * 336 * 8 / 14, "2 (n - 1) steps"),
    ("all_reduce", "Ring", "Simple", amd(), 1, 17 + 14 * 2.1, 336 * 8 / 14, "by protocol"),
    ("all_gather", "Ring", "LL", amd(), 1, 12 + 7 * 0.8, 0.08 * 336 * 8 / 7, "n - 1 steps"),
    ("all_reduce", "Tree", "LL", amd(), MIB, 12 + 2 * 7 * 0.9, 0.06 * 336 / 2, "1 MiB is not corrected"),
    ("all_reduce", "Tree", "LL", amd(), 2 * MIB, 12 + 2 * 7 * 0.9, 0.06 * 336 / 2, "nor 2 MiB"),
    ("all_reduce", "Tree", "LL", amd(), 4 * MIB, 12 + 2 * 7 * 0.9, 0.06 * 336 / 2 * 0.1, "4 MiB are, to a tenth"),
    ("all_reduce", "Tree", "LL", amd(), 64 << 11, 12 + 2 * 7 * 0.9, 0.06 * 336 / 2 * 0.6, "and 128 KiB"),
    ("all_reduce", "Tree", "LL", amd(), 1 << 40, 12 + 2 * 7 * 0.9, 0.06 * 336 / 2 * 0.1, "all beyond the last as it"),
    ("broadcast", "Ring", "LL", amd(), 1, 12 + 8 * 0.8, 0.08 * 336 * 1.65, "a chain in LL on one node has more"),
    ("broadcast", "Ring", "Simple", amd(), 1, 17 + 8 * 2.3, 336, "every step, in Simple as a tree's"),
    ("reduce", "Ring", "LL", amd(2), 64 << 11, 12 + 16 * 9.5, 0.08 * 336, "not between nodes"),
    ("all_reduce", "Ring", "LL", amd(2), 64 << 11, 12 + 28 * 1.0 + 2 * 9.5, 0.08 * 336 * 16 / 30, "at least 1 us"),
    ("all_reduce", "Ring", "LL", amd(2, amd=True), 64 << 11, 12 + 28 * 2.0 + 2 * 9.5, 0.08 * 336 * 16 / 30, "or 2"),
    ("all_reduce", "Ring", "Simple", amd(2), 256 * MIB, 17 + 28 * 3.0 + 2 * 320, 336 * 16 / 30, "or 3 in Simple"),
    ("all_reduce", "Ring", "Simple", amd(2), 128 * MIB, 17 + 28 * 3 + 2 * 320, 33.6 * 16 / 30, "less below 256 MiB"),
    ("all_gather", "Ring", "LL", amd(2), 64 << 11, 12 + 14 + 9.5, 0.08 * 336 * 16 / 15, "one step between two nodes"),
    ("all_gather", "Ring", "LL", amd(4, 1), 64 << 11, 12 + 3 * 10.5, 0.08 * 336 * 4 / 3, "one GPU a node: a tree's"),
    ("all_reduce", "Tree", "LL", amd(2), MIB, 12 + 2 * (7 * 0.9 + 10.5), 0.06 * 336 / 2, "one deep"),
    ("all_reduce", "Tree", "LL", amd(4), MIB, 12 + 2 * (7 * 0.9 + 21.0), 0.06 * 336 / 2, "two deep"),
    ("all_reduce", "Tree", "Simple", amd(2), 64 << 16, 17 + 2 * (7 * 2.3 + 25), 0.11 * 336 / 2, "two nodes' share"),
    ("all_reduce", "Tree", "Simple", amd(3), 64 << 16, 17 + 2 * (7 * 2.3 + 25), 0.59 * 336 / 2, "more nodes' share"),
    ("broadcast", "Ring", "LL", amd(**MI250), 1, 12 + 8 * 0.8, 20.0, "MI250X's chains in LL have no more"),
    ("all_reduce", "Tree", "Simple", amd(**MI250), 64, 17 + 2 * 7 * 2.5, 1.75 * 100 / 2, "MI250X has it on one node"),
    ("all_reduce", "Tree", "Simple", amd(version=(2, 21), num_nodes=2, num_ranks=16), 1 << 31, 17 + 2 * (16.1 + 25),
     0.11 * 336 / 2, "2.21's trees are corrected at 4 GiB only"),
    ("all_reduce", "Ring", "Simple", amd(2, version=(2, 21)), 256 * MIB, 17 + 84 + 640, 33.6 * 16 / 30, "not in 2.21"),
    ("all_reduce", "Ring", "Simple", amd(2, version=(2, 22)), 256 * MIB, 17 + 84 + 640, 336 * 16 / 30, "in 2.22"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "algo", "proto", "on", "nbytes", "us", "gbps", "reason"), RCCL_US)
def test_times_that_rccl_believes(
    op: str, algo: str, proto: str, on: Machine, nbytes: int, us: float, gbps: float, reason: str
) -> None:
    """Latency and bytes, by the tables of its tuning models."""
    assert believed_us(op, nbytes, algo, proto, on) == pytest.approx(us + nbytes / gbps / 1000), reason


RCCL_EXCLUDED = [
    ("all_gather", "Tree", "LL", amd(), "all_gather has no tree"),
    ("all_reduce", "Tree", "Simple", amd(), "RCCL has no Tree in Simple on one node"),
    ("all_reduce", "Ring", "LL128", amd(2, **MI250), "RCCL's model of MI250X has no LL128"),
    ("all_reduce", "Ring", "LL128", amd(), "RCCL's topology for one node has no LL128"),
    ("all_reduce", "Ring", "LL128", amd(2, version=(2, 24)), "LL128 came with RCCL 2.25"),
    ("all_reduce", "NVLS", "Simple", amd(), "RCCL has no NVLS here"),
    ("all_reduce", "MSCCL", "LL", amd(), "MSCCL has all_reduces from 1024 to 524287 bytes in LL"),
    ("all_gather", "MSCCL", "Simple", amd(), "MSCCL has all_reduces from 524288 to 16777216 bytes in Simple"),
]


@pytest.mark.parametrize(("op", "algo", "proto", "on", "why"), RCCL_EXCLUDED)
def test_choices_that_rccl_does_not_have(op: str, algo: str, proto: str, on: Machine, why: str) -> None:
    """With the reason, at 1 MiB."""
    one = candidate(rccl_candidates(op, MIB, on), algo, proto)
    assert (one.believed_us, one.why) == (None, why)


@pytest.mark.parametrize(
    ("nbytes", "proto"),
    [
        (1023, None),
        (1024, "LL"),
        ((1 << 19) - 1, "LL"),
        (1 << 19, "Simple"),
        (1 << 24, "Simple"),
        ((1 << 24) + 1, None),
    ],
)
def test_msccl_has_all_reduces_of_eight_gpus(nbytes: int, proto: str | None) -> None:
    """Taken without asking the model; not on two nodes, of four GPUs, or on other models."""
    every = [one for one in rccl_candidates("all_reduce", nbytes, amd()) if one.algo == "MSCCL"]
    assert [one.proto for one in every if one.believed_us == 0.0] == ([proto] if proto else [])
    for on in (amd(2), amd(1, 4), amd(2, 4), amd(rccl=6)):
        assert not any(one.algo == "MSCCL" for one in rccl_candidates("all_reduce", nbytes, on))


RANGES = [
    ("all_reduce", MIB, amd(2), "LL", "LL up to 1 MiB"),
    ("all_reduce", MIB + 1, amd(2), "LL128", "LL128 from there on"),
    ("all_reduce", 9 * MIB, amd(2), "LL128", "up to 9 MiB"),
    ("all_reduce", 9 * MIB + 1, amd(2), "Simple", "Simple beyond"),
    ("all_reduce", int(9 * MIB * 3.8), amd(3), "LL128", "3.8 times as far on more nodes"),
    ("all_reduce", int(9 * MIB * 3.8) + 1, amd(3), "Simple", "and no farther"),
    ("all_gather", 98304 * 16, amd(2), "LL", "by bytes of a rank"),
    ("all_gather", 98304 * 16 + 16, amd(2), "LL128", "by bytes of a rank"),
    ("all_gather", 5046272 * 24 + 24, amd(3), "Simple", "no farther on more nodes"),
    ("reduce_scatter", 131072 * 16, amd(2), "LL", "both ranges hold above this"),
    ("reduce_scatter", 131072 * 16 + 16, amd(2), "LL128", "and LL128 is taken"),
    ("reduce_scatter", 0, amd(2), "Simple", "of nothing"),
    ("broadcast", MIB, amd(2), None, "MI300X has none for it"),
    ("broadcast", 2048 * 16, amd(2, rccl=6), "LL", "MI355X has"),
    ("all_reduce", MIB, amd(1), None, "between nodes only"),
    ("all_reduce", MIB, amd(2, version=(2, 24)), None, "since 2.25"),
]


@pytest.mark.parametrize(("op", "nbytes", "on", "proto", "reason"), RANGES)
def test_protocols_by_ranges(op: str, nbytes: int, on: Machine, proto: str | None, reason: str) -> None:
    """Of rcclUpdateCollectiveProtocol."""
    assert ranged_protocol(op, nbytes, on) == proto, reason


def test_tuning_models_by_gpu() -> None:
    """MI250X, MI300X and MI355X; others have NCCL's."""
    assert [model_of(capability) for capability in (89, 90, 94, 95, 100)] == [0, 3, 5, 6, 0]
