"""What NCCL's choices cost beyond the links, rule by rule, with round constants."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.collectives.constants import Constants
from distsim.collectives.libraries.nccl_timing import NcclTiming
from distsim.collectives.libraries.nccl_tuning import Machine
from distsim.collectives.plan import TransferCost
from tests.collectives.test_tuning_rules import KIB, MIB, machine

VALUES = {
    "ib.eager_bytes": 1000.0, "ib.told_us": 2.0, "ib.hop": 3.0, "ib.ring_LL": 2.0, "ib.ring_LL128": 4.0,
    "ib.tree_LL128": 5.0, "ib.ring_more": 7.0, "ib.tree_more": 8.0, "ib.efficiency": 0.5, "ib.loss": 0.2,
    "ib.ring_loss": 0.1, "ib.ring_nodes": 2.0, "ib.message_LL": 1.0, "ib.message_LL128": 2.0, "ib.message_Simple": 3.0,
    "ib.message_pair": 0.5, "ib.rendezvous": 9.0, "ib.channel_LL": 2.0, "ib.rate_LL": 4.0,
    "hopper.hop_LL": 1.0, "hopper.hop_LL128": 2.0, "hopper.hop_Simple": 3.0, "hopper.channel_LL": 6.0,
    "hopper.efficiency_LL128": 0.5, "hopper.efficiency_Simple": 0.8, "hopper.local": 0.1,
    "pcie.hop_LL": 4.0, "pcie.channel_LL": 3.0, "pcie.efficiency": 0.25, "pcie.root": 0.5,
    "launch.shared_process_per_gpu": 2.0, "launch.process_intel": 5.0, "p2p.shared_process_per_gpu": 3.0,
    "slingshot.eager_bytes": 1e15, "slingshot.matched_ranks": 16.0, "tcp.eager_bytes": 1e15,
    "tcp.message_LL128": 2.0,
}  # fmt: skip


def timing(net: str = "ib", launcher: str = "process", settings: Any = None, **node: Any) -> NcclTiming:
    nccl = SimpleNamespace(
        net=net, cpu_vendor="intel", settings=settings or {}, compute_capability=90, plugin="", library="nccl"
    )
    fields = {"nics_beyond_root": False, "gpu_direct_rdma": True, "nic_bytes_per_s": 40.0, "pcie_bytes_per_s": 20.0}
    cluster: Any = SimpleNamespace(nccl=nccl, node=SimpleNamespace(**{**fields, **node}))
    return NcclTiming(cluster, Constants(VALUES), launcher, (2, 30))


PAIR, FOUR = machine(2), machine(4)
HOPS = [
    ("ring", "LL", 1.0, 2 * 3 * 2, "the plugin's latency, a hop, a ring's share"),
    ("ring", "LL128", 2.0, 2 * 3 * 4, "a protocol has its own share"),
    ("ring", "Simple", 3.0, 2 * 3 * 2 + 7, "a flag behind the data"),
    ("tree", "LL", 1.0, 2 * 3, "a tree's hop is the plain one"),
    ("tree", "LL128", 2.0, 2 * 3 * 5, "but in LL128"),
    ("tree", "Simple", 3.0, 2 * 3 + 8, "a flag behind the data"),
]


@pytest.mark.parametrize(("algo", "proto", "inside_us", "between_us", "reason"), HOPS)
def test_hops(algo: str, proto: str, inside_us: float, between_us: float, reason: str) -> None:
    """Inside a node and between nodes."""
    assert timing().hops_s(PAIR, algo, proto) == pytest.approx((inside_us * 1e-6, between_us * 1e-6)), reason


MESSAGES = [
    # machine, bytes, protocol -> microseconds beyond the first message
    (FOUR, 1, "LL", 0.0, "one message"),
    (FOUR, 8 * 32 * 512 * 3, "LL", 2.0, "one channel for each 512 bytes of a warp and rank"),
    (FOUR, 8 * 32 * 512 * 99, "LL", 15.0, "16 channels at most"),
    (PAIR, 8 * 16 * 512 * 3, "LL", 1.0, "half of it between two nodes"),
    (PAIR, 8 * 640 * 3, "LL128", 4.0, "not in LL128"),
    (FOUR, 64 * 512 * 3, "Simple", 6.0, "a piece of less than 32 KiB is one slice"),
    (FOUR, 64 * 512 * 16 * 32, "Simple", 3.0 * 15, "as is one of 32 KiB"),
    (FOUR, 64 * 512 * 16 * 32 + 1024, "Simple", 3.0 * 31, "a longer one is two"),
    (machine(4, nics=4), 8 * 640 * 9, "LL128", 4.0, "NICs send beside each other"),
]


@pytest.mark.parametrize(("on", "nbytes", "proto", "us", "reason"), MESSAGES)
def test_messages_of_a_step(on: Machine, nbytes: float, proto: str, us: float, reason: str) -> None:
    """One for each channel in use."""
    assert timing().messages_s(on, nbytes, proto) == pytest.approx(us * 1e-6), reason


def test_sockets_send_one_message_after_the_other() -> None:
    """Whichever NIC they leave by."""
    assert timing("tcp").messages_s(machine(4, nics=4), 8 * 640 * 9, "LL128") == pytest.approx(16e-6)


@pytest.mark.parametrize(
    ("nodes", "ring", "factor"),
    [(2, False, 1.0), (4, False, 1.2), (8, False, 1.4), (64, False, 2.0), (128, False, 2.0), (8, True, 1.2)],
)
def test_a_network_of_more_nodes_carries_less(nodes: int, ring: bool, factor: float) -> None:
    """With each doubling up to 64; the wire has the inverse of the efficiency."""
    on = machine(nodes)
    assert timing().lost(on, ring) == pytest.approx(factor)
    assert timing().net_wire(on, ring) == pytest.approx(2 * factor)
    assert timing().net_wire(machine(1), ring) == 1.0


@pytest.mark.parametrize(("beyond", "direct", "wire"), [(True, True, 4.0), (False, True, 0.0), (True, False, 0.0)])
def test_nics_beyond_root_ports(beyond: bool, direct: bool, wire: float) -> None:
    """They read GPUs at a part of PCIe's speed, and the network is as slow as that."""
    of = timing(nics_beyond_root=beyond, gpu_direct_rdma=direct)
    assert of.root_wire() == wire
    assert of.net_wire(PAIR) == max(wire, 2.0)


@pytest.mark.parametrize(
    ("nbytes", "parts", "us"), [(500, 1, 0.0), (501, 1, 9.0), (1000, 2, 0.0), (1001, 2, 9.0), (900, 1, 0.0)]
)
def test_long_messages_meet_first(nbytes: int, parts: int, us: float) -> None:
    """Over 1,000 bytes with their flags, by channel and part."""
    per_channel = 450 if nbytes == 900 else 10_000
    assert timing().rendezvous_s(PAIR, nbytes, per_channel, parts) == pytest.approx(us * 1e-6)


def test_bytes_up_to_which_nothing_meets() -> None:
    """By a setting, where the fabric has such a switch at all."""
    setting = {"FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD": "77"}
    assert [timing().eager_bytes, timing(settings=setting).eager_bytes] == [1000.0, 77.0]
    assert timing("slingshot", settings=setting).eager_bytes == 1e15


def test_who_matches_messages() -> None:
    """A NIC of Slingshot up to its number of ranks, then the host."""
    of = timing("slingshot")
    assert [of.matching(machine(2)), of.matching(machine(2, 9))] == ["slingshot", "slingshot-software"]
    assert timing().matching(machine(64)) == "ib"


def test_launches() -> None:
    """One process for each GPU, or one for all of a node, which launches one after the other."""
    group: Any = SimpleNamespace(per_node=8)
    shared = timing(launcher="shared")
    assert (timing().floor_s(group), timing().p2p_floor_s(group)) == pytest.approx((5e-6, 5e-6))
    assert (shared.floor_s(group), shared.p2p_floor_s(group)) == pytest.approx((16e-6, 24e-6))
    shared.cluster.nccl.library = "rccl"  # type: ignore[misc]
    assert shared.p2p_floor_s(group) == pytest.approx(16e-6)


COSTS = [
    # machine, protocol, channels of LL -> wire inside, wire between, GB/s of an edge
    (machine(), "LL", 4, (2.0, 2.0, 24.0), "half of LL is flags"),
    (machine(), "LL", 0.5, (2.0, 2.0, 6.0), "one channel at least"),
    (machine(), "LL", 99, (2.0, 2.0, 96.0), "as many as are open at most"),
    (machine(intra="pci"), "LL", 4, (2.0, 2.0, 12.0), "over PCIe"),
    (PAIR, "LL", 4, (2.0, 4.0, 4.0), "a NIC's host memory"),
    (machine(2, nics=4), "LL", 4, (2.0, 4.0, 16.0), "of each NIC"),
    (machine(), "LL128", 4, (2.5, 128 / 120, math.inf), "efficiency, and half of 5 local bytes"),
    (machine(), "Simple", 4, (1.75, 1.0, math.inf), "a protocol's own efficiency"),
    (machine(intra="pci"), "Simple", 4, (4.0, 1.0, math.inf), "PCIe's"),
    (machine(has_fewer_channels=True), "LL128", 4, (2.5, 128 / 120, 16 * 36.7), "few channels carry what they can"),
    (machine(has_fewer_channels=True), "Simple", 4, (1.75, 1.0, 16 * 38.7), "in Simple a tree's figure"),
]


@pytest.mark.parametrize(("on", "proto", "channels", "cost", "reason"), COSTS)
def test_what_a_protocol_adds(on: Machine, proto: str, channels: float, cost: Any, reason: str) -> None:
    """Bytes on the wire for each of payload, and the most that an edge carries."""
    result = timing().cost(on, proto, channels, 5.0)
    gbps = result.edge_bytes_per_s / 1e9
    assert (result.wire, result.net_wire, gbps) == pytest.approx(cost), reason
    assert result.intra_links == 0.0


STORED = [
    # nodes, bytes, GB/s of an edge -> of the edge, near, far
    (2, 4 * 4096, 4.0, (4.0, 8.0, 8.0), "four channels store 8 GB/s"),
    (4, 4 * 4096, 16.0, (4.0, math.inf, 8.0), "twice what passes inside a tree"),
    (2, MIB, 16.0, (16.0, 32.0, 32.0), "16 channels at most"),
    (2, KIB, 1.0, (1.0, 2.0, 2.0), "one at least"),
]


@pytest.mark.parametrize(("nodes", "nbytes", "edge", "rates", "reason"), STORED)
def test_a_tree_stores_pieces_of_ll(nodes: int, nbytes: int, edge: float, rates: Any, reason: str) -> None:
    """In the host's memory, at the rate of a channel."""
    cost = timing().stored(machine(nodes), nbytes, TransferCost(edge_bytes_per_s=edge * 1e9))
    near, far = cost.near_bytes_per_s or 0.0, cost.far_bytes_per_s or 0.0
    assert (cost.edge_bytes_per_s / 1e9, near / 1e9, far / 1e9) == pytest.approx(rates), reason
