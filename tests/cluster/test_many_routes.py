"""Routes of many pairs at once are those of each pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distsim.cluster import Cluster, load_cluster, preset_names
from distsim.cluster.graph.host_template import HostTemplate
from distsim.cluster.graph.wiring import GraphWiring
from distsim.errors import UsageError
from tests.cluster.made import made
from tests.cluster.test_fabrics import FABRICS, IDS

PAIRS = 300


def same(cluster: Cluster, key: int) -> None:
    """Pairs drawn from the whole cluster, some of one node, with and without a forced NIC."""
    draw = np.random.default_rng(abs(key))
    count = len(cluster.devices)
    src = draw.integers(0, count, PAIRS)
    near = draw.random(PAIRS) < 0.3
    dst = np.where(near, src // 4 * 4 + draw.integers(0, min(4, count), PAIRS), draw.integers(0, count, PAIRS))
    dst = np.minimum(dst, count - 1)
    rails = np.where(draw.random(PAIRS) < 0.5, -1, draw.integers(0, max(1, cluster.node.num_nics), PAIRS))
    if not cluster.node.num_nics:
        rails[:] = -1
    rows = cluster.routes(src, dst, key, rails)
    for a, b, rail, row in zip(src.tolist(), dst.tolist(), rails.tolist(), rows, strict=True):
        expected = cluster.route(cluster.devices[a], cluster.devices[b], key, None if rail < 0 else rail)
        assert tuple(row[row >= 0].tolist()) == expected


@pytest.mark.parametrize("name", preset_names())
def test_on_every_preset(name: str) -> None:
    """Inside a node, through a shared NVSwitch, over leaves, spines and cores; keys of any size and sign."""
    for nodes, key in ((1, 0), (3, -5), (40, 1 << 70)):
        same(load_cluster(f"{name}:{nodes}"), key)


@pytest.mark.parametrize(("kind", "nodes", "parameters"), [fabric[:3] for fabric in FABRICS], ids=IDS)
def test_on_every_fabric(kind: str, nodes: int, parameters: dict[str, Any]) -> None:
    """Trees, grids, meshes and dragonflies."""
    same(made(nodes=nodes, fabric={"kind": kind, **parameters}), 7)


def test_an_imported_graph() -> None:
    """Whose routes are searched for."""
    cluster = load_cluster("dgx-a100:2")
    wiring = GraphWiring(cluster.vertices, cluster.links)
    rows = wiring.routes(np.array([0, 1, 3]), np.array([9, 0, 3]), 2, np.array([-1, -1, -1]))
    found = [tuple(row[row >= 0].tolist()) for row in rows]
    assert found == [wiring.route(a, b, 2, None) for a, b in ((0, 9), (1, 0), (3, 3))]


def test_a_pair_without_a_way_is_named() -> None:
    """As `route` names it."""
    cluster = load_cluster("dgx-h100:2")
    with pytest.raises(UsageError, match="expected a rail from 0 to 7, got 9"):
        cluster.routes(np.array([0, 0]), np.array([1, 8]), 0, np.array([-1, 9]))


def test_ways_that_come_in_by_another_nic() -> None:
    """Out by one rail and in by another, over the fabric between them; each pair alone has the same way."""
    cluster = made(nodes=3, node={"nic": {"count": 8}})
    src, dst = np.array([0, 3]), np.array([9, 20])
    rows = cluster.routes(src, dst, 0, np.array([2, -1]), np.array([5, -1]))
    names = [[(cluster.links[i].src, cluster.links[i].dst) for i in row[row >= 0]] for row in rows]
    assert "n0/nic2" in {one for link in names[0] for one in link}
    assert "n1/nic5" in {one for link in names[0] for one in link}
    alone = [cluster._wiring.route(0, 9, 0, 2, 5), cluster._wiring.route(3, 20, 0, None)]
    assert [tuple(row[row >= 0].tolist()) for row in rows] == alone


def test_the_paths_of_a_host_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From each of its parts, however many tables are made of them."""
    looked: list[str] = []
    plain = HostTemplate.tree

    def tree(self: HostTemplate, source: str) -> object:
        looked.append(source)
        return plain(self, source)

    monkeypatch.setattr(HostTemplate, "tree", tree)
    cluster = made(nodes=2)
    cluster.route(cluster.devices[0], cluster.devices[9])
    assert len(looked) == len(set(looked)) > 8
