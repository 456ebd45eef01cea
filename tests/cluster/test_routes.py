"""The way from one device to another."""

from __future__ import annotations

import pytest

from distsim.cluster import load_cluster
from distsim.errors import UsageError
from tests.cluster.made import hop_names, made


def test_inside_a_node_gpus_talk_through_the_nvswitch() -> None:
    """Two NVLink hops; nothing from a GPU to itself."""
    cluster = load_cluster("dgx-h100")
    assert hop_names(cluster, "n0/gpu0", "n0/gpu5") == ["n0/gpu0", "n0/nvswitch0", "n0/gpu5"]
    assert cluster.route("n0/gpu3", "n0/gpu3") == ()


def test_without_nvlink_gpus_talk_over_their_sockets() -> None:
    """PCIe to the socket, across, and down again; GeForce cards, which do not reach each other, by way of the host
    memory of the receiver's socket."""
    direct = made("pcie-4090", node={"pcie": {"peer_to_peer": True}})
    assert hop_names(direct, "n0/gpu0", "n0/gpu7") == ["n0/gpu0", "n0/cpu0", "n0/cpu1", "n0/gpu7"]
    assert hop_names(direct, "n0/gpu0", "n0/gpu1") == ["n0/gpu0", "n0/cpu0", "n0/gpu1"]
    staged = load_cluster("pcie-4090")
    assert hop_names(staged, "n0/gpu0", "n0/gpu7") == ["n0/gpu0", "n0/cpu0", "n0/cpu1", "n0/cpu1", "n0/gpu7"]
    assert hop_names(staged, "n0/gpu0", "n0/gpu1") == ["n0/gpu0", "n0/cpu0", "n0/cpu0", "n0/gpu1"]


def test_a_gpu_uses_the_nic_beside_it() -> None:
    """GPU k has NIC k where there are as many, and shares where there are fewer."""
    h100 = load_cluster("dgx-h100:2")
    for k in range(8):
        assert f"n0/nic{k}" in hop_names(h100, f"n0/gpu{k}", f"n1/gpu{k}")
    p4d = load_cluster("aws-p4d:2")
    for k in range(8):
        assert f"n0/nic{k // 2}" in hop_names(p4d, f"n0/gpu{k}", "n1/gpu0")


def test_several_nics_of_one_gpu_are_chosen_by_the_flow() -> None:
    """A node with two NICs a GPU: flows spread over both, and over no other."""
    cluster = made(nodes=2, node={"nic": {"count": 16}})
    used = {hop_names(cluster, "n0/gpu3", "n1/gpu3", key)[2] for key in range(32)}
    assert used == {"n0/nic6", "n0/nic7"}


def test_rails_stay_on_their_leaf() -> None:
    """The same rail of one unit: one leaf. Another rail, or another unit: over a spine."""
    cluster = load_cluster("dgx-h100:64")
    assert hop_names(cluster, "n0/gpu2", "n31/gpu2")[3:4] == ["leaf2"]
    assert len(hop_names(cluster, "n0/gpu2", "n31/gpu2")) == 7
    assert [n for n in hop_names(cluster, "n0/gpu2", "n31/gpu4") if "/" not in n] == [
        "leaf2",
        "spine0",
        "leaf4",
    ]
    assert [n for n in hop_names(cluster, "n0/gpu2", "n32/gpu2") if "/" not in n] == [
        "leaf2",
        "spine0",
        "leaf10",
    ]


def test_a_rail_can_be_forced() -> None:
    """Over NVLink to the GPU beside that NIC, at both ends."""
    cluster = load_cluster("dgx-h100:2")
    hops = hop_names(cluster, "n0/gpu1", "n1/gpu1", rail=6)
    assert hops[:5] == ["n0/gpu1", "n0/nvswitch0", "n0/gpu6", "n0/pcie3", "n0/nic6"]
    assert hops[-5:] == ["n1/nic6", "n1/pcie3", "n1/gpu6", "n1/nvswitch0", "n1/gpu1"]
    with pytest.raises(UsageError, match="expected a rail from 0 to 7, got 8"):
        cluster.route("n0/gpu1", "n1/gpu1", rail=8)


def test_ecmp_hashes_flows_over_all_spines_and_keeps_to_it() -> None:
    """The same key takes the same way, in another cluster object too; many keys use every spine."""
    cluster, again = (made("ethernet-cpu", 80) for _ in range(2))
    ways = [cluster.route("n0/cpu0", "n50/cpu0", key) for key in range(64)]
    assert ways == [again.route("n0/cpu0", "n50/cpu0", key) for key in range(64)]
    spines = {cluster.links[way[2]].dst for way in ways}
    assert spines == {"spine0", "spine1", "spine2", "spine3"}


def test_adaptive_routing_is_one_spine_with_the_bandwidth_of_all() -> None:
    """What the fabric can carry is the same, a flow is not bound to one spine."""
    ecmp = made(nodes=64, fabric={"routing": "ecmp"})
    adaptive = made(nodes=64, fabric={"routing": "adaptive"})
    for cluster, spines in ((ecmp, 16), (adaptive, 1)):
        up = [link for link in cluster.links if link.src == "leaf0" and link.kind == "fabric"]
        assert len(up) == spines
        assert sum(link.bandwidth_bytes_per_s for link in up) == pytest.approx(32 * 48.5e9)
    assert ecmp.bisection_bandwidth_bytes_per_s() == pytest.approx(adaptive.bisection_bandwidth_bytes_per_s())


def test_latency_from_host_to_host_is_the_nics_and_the_switches() -> None:
    """The file's NIC latency once, a switch's latency for each switch, PCIe for each hop."""
    cluster = load_cluster("dgx-h100:64")
    near = sum(cluster.links[i].latency_s for i in cluster.route("n0/gpu0", "n1/gpu0"))
    far = sum(cluster.links[i].latency_s for i in cluster.route("n0/gpu0", "n32/gpu0"))
    assert near == pytest.approx(4 * 0.3e-6 + 1e-6 + 130e-9)
    assert far == pytest.approx(near + 2 * 130e-9)


def test_ranks_on_sockets_talk_over_loopback() -> None:
    """TCP inside a node has its own link, shared by the ranks of the socket."""
    cluster = load_cluster("ethernet-cpu:2")
    kinds = [[cluster.links[i].kind for i in cluster.route("n0/cpu0", dst)] for dst in ("n0/cpu0", "n0/cpu1")]
    assert kinds == [["loopback"], ["loopback", "socket"]]
    assert hop_names(cluster, "n0/cpu1", "n1/cpu1")[1:3] == ["n0/cpu0", "n0/nic0"]


def test_an_unknown_device_is_refused_by_name() -> None:
    """The message says which there are."""
    with pytest.raises(UsageError, match=r"expected a device of dgx-h100 \(n0/gpu0 to n0/gpu7\), got 'n0/gpu8'"):
        load_cluster("dgx-h100").route("n0/gpu0", "n0/gpu8")


def test_the_graph_has_every_vertex_and_link() -> None:
    """networkx sees what routes use, with the same figures."""
    cluster = load_cluster("dgx-h100:2")
    graph = cluster.graph
    assert graph.number_of_nodes() == len(cluster.vertices)
    assert graph.number_of_edges() == len(cluster.links)
    for link in cluster.links:
        edge = graph.edges[link.src, link.dst]
        assert (edge["index"], edge["kind"]) == (link.index, link.kind)
        assert edge["bandwidth_bytes_per_s"] == link.bandwidth_bytes_per_s
    assert graph.nodes["n1/gpu3"] == {"kind": "gpu", "host": 1, "local": 3}
    assert graph.nodes["leaf0"]["host"] is None
