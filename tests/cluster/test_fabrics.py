"""What connects hosts: structure, routes against shortest paths, bisection."""

from __future__ import annotations

from typing import Any

import networkx
import numpy as np
import pytest

from distsim.cluster import Cluster
from distsim.errors import UsageError
from tests.cluster.made import hop_names, made

NIC_BYTES_PER_S = 48.5e9
EGRESS_BYTES_PER_S = 8 * NIC_BYTES_PER_S

# kind, nodes, parameters, whether routes are shortest paths, bisection by hand in GB/s.
FABRICS: list[tuple[str, int, dict[str, Any], bool, float]] = [
    ("star", 6, {}, True, 3 * 388),
    ("leaf-spine", 8, {"nodes_per_leaf": 2, "spines": 3}, True, 4 * 388),
    ("leaf-spine", 8, {"nodes_per_leaf": 2, "spines": 3, "oversubscription": 4.0}, True, 4 * 388 / 4),
    ("rail-optimised", 8, {"nodes_per_leaf": 2, "spines": 2, "oversubscription": 2.0}, True, 4 * 388 / 2),
    ("rail-only", 6, {}, True, 3 * 388),
    ("fat-tree", 16, {"nodes_per_leaf": 2, "leaves_per_pod": 2, "spines": 2, "cores": 3}, True, 8 * 388),
    (
        "fat-tree",
        16,
        {"nodes_per_leaf": 2, "leaves_per_pod": 2, "spines": 2, "cores": 3, "core_oversubscription": 8.0},
        True,
        8 * 388 / 8,
    ),
    ("torus", 16, {"dims": [4, 4], "bandwidth": "10GBps"}, True, 2 * 4 * 10),
    ("torus", 24, {"dims": [2, 3, 4], "bandwidth": "10GBps"}, True, 2 * 6 * 10),
    ("torus", 8, {"dims": [4, 2], "bandwidth": "10GBps"}, True, 4 * 10),
    ("ring", 7, {"bandwidth": "10GBps"}, True, 2 * 10),
    ("ring", 2, {"bandwidth": "10GBps"}, True, 10),
    ("full-mesh", 6, {"bandwidth": "10GBps"}, True, 9 * 10),
    (
        "dragonfly",
        32,
        {
            "nodes_per_switch": 2,
            "switches_per_group": 4,
            "bandwidth": "10000GBps",
            "global_bandwidth": "40GBps",
            "global_links": 2,
            "routing": "ecmp",
        },
        False,
        4 * 40,
    ),
    (
        "dragonfly",
        32,
        {
            "nodes_per_switch": 2,
            "switches_per_group": 4,
            "bandwidth": "10000GBps",
            "global_bandwidth": "40GBps",
        },
        False,
        4 * 40,
    ),
]
IDS = [f"{kind}-{number}" for number, (kind, *_) in enumerate(FABRICS)]


def _made(kind: str, nodes: int, parameters: dict[str, Any]) -> Cluster:
    return made(nodes=nodes, fabric={"kind": kind, **parameters})


@pytest.mark.parametrize(("kind", "nodes", "parameters", "shortest", "gigabytes_per_s"), FABRICS, ids=IDS)
def test_routes_lead_there_and_are_as_short_as_can_be(
    kind: str, nodes: int, parameters: dict[str, Any], shortest: bool, gigabytes_per_s: float
) -> None:
    """Structural routes against networkx's shortest paths, for every pair of nodes and several flows."""
    cluster = _made(kind, nodes, parameters)
    outside = cluster.graph.subgraph([v.name for v in cluster.vertices if v.host is None])
    for src in range(nodes):
        for dst in range(nodes):
            for key in range(3):
                hops = hop_names(cluster, f"n{src}/gpu1", f"n{dst}/gpu1", key)
                switches = [hop for hop in hops if hop in outside]
                assert len(set(hops)) == len(hops)
                if src != dst and shortest:
                    best = networkx.shortest_path_length(outside, switches[0], switches[-1])
                    assert len(switches) - 1 == best
                elif src != dst:
                    assert len(switches) <= 4


@pytest.mark.parametrize(("kind", "nodes", "parameters", "shortest", "gigabytes_per_s"), FABRICS, ids=IDS)
def test_bisection_of_a_fabric(
    kind: str, nodes: int, parameters: dict[str, Any], shortest: bool, gigabytes_per_s: float
) -> None:
    """The cut between the first half of the nodes and the second, computed by hand."""
    bisection = _made(kind, nodes, parameters).bisection_bandwidth_bytes_per_s()
    assert bisection == pytest.approx(gigabytes_per_s * 1e9, rel=1e-6)


def test_a_torus_without_a_bandwidth_takes_the_hosts() -> None:
    """One link carries what a host's NICs can send."""
    cluster = _made("torus", 9, {"dims": [3, 3]})
    rates = {link.bandwidth_bytes_per_s for link in cluster.links if link.kind == "fabric"}
    assert rates == {EGRESS_BYTES_PER_S}


def test_both_ways_round_a_ring_are_used_on_a_tie() -> None:
    """Opposite nodes of an even ring: the flow decides."""
    cluster = _made("ring", 4, {})
    middles = {hop_names(cluster, "n0/gpu0", "n2/gpu0", key)[4] for key in range(32)}
    assert middles == {"router1", "router3"}


def test_a_dragonfly_spreads_its_gateways() -> None:
    """Cables to different groups end at different switches of a group."""
    cluster = _made("dragonfly", 32, FABRICS[-1][2])
    gateways = [
        link.src
        for link in cluster.links
        if link.kind == "fabric" and link.src.startswith("group0/") and not link.dst.startswith("group0/")
    ]
    assert len(gateways) == 3
    assert len(set(gateways)) == 3


def test_a_graph_too_large_for_a_maximum_flow_says_so() -> None:
    """A full mesh of 300 nodes has 89,700 links."""
    with pytest.raises(UsageError, match="bisection bandwidth is computed up to 60000 links, got 90"):
        _made("full-mesh", 300, {}).bisection_bandwidth_bytes_per_s()


def test_data_change_rails_inside_a_node_where_nothing_connects_the_rails() -> None:
    """On a rail-only fabric data for another rail go to the GPU of that rail by NVLink; the same rail is one switch."""
    cluster = _made("rail-only", 2, {})
    away = hop_names(cluster, "n0/gpu0", "n1/gpu3")
    assert "n0/gpu3" in away
    assert [name for name in away if name.startswith("rail")] == ["rail3"]
    straight = hop_names(cluster, "n0/gpu3", "n1/gpu3")
    assert len(straight) < len(away)
    assert "n0/gpu0" not in straight
    one_way = cluster.routes(np.array([0, 3]), np.array([11, 11]), 0, np.array([-1, -1]))
    assert [tuple(row[row >= 0]) for row in one_way] == [cluster.route("n0/gpu0", "n1/gpu3"),
                                                       cluster.route("n0/gpu3", "n1/gpu3")]  # fmt: skip
