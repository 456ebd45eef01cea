"""Rings of groups with one member a node, which are made without a step for each, and of meshes."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from distsim.cluster import load_cluster
from distsim.collectives.algorithms.ring import _orders, rings_of
from distsim.collectives.members import LinkArrays, Members


@pytest.mark.parametrize("name", ["dgx-h100:9", "dgx-a100:8", "aws-p4d:5"])
def test_rings_of_one_member_a_node_are_those_of_many(name: str) -> None:
    """The short way gives the rings, NICs and routes of the general one, wherever on its node each member is."""
    cluster, draw = load_cluster(name), random.Random(7)
    links, per_node = LinkArrays(cluster), len(cluster.devices) // cluster.num_nodes
    for mixed in (False, True):
        nodes = draw.sample(range(cluster.num_nodes), 4 + mixed)
        at = [draw.randrange(per_node) if mixed else 3 for _ in nodes]
        devices = tuple(cluster.devices[node * per_node + local] for node, local in zip(nodes, at, strict=True))
        short, general = Members(cluster, devices, 5, links), Members(cluster, devices, 5, links)
        general.__dict__["per_domain"] = 2  # as if another node had two
        assert short.num_gates == general.num_gates
        for one, other in zip(rings_of(short), rings_of(general), strict=True):
            assert (one.src, one.dst) == (other.src, other.dst)
            assert np.array_equal(one.ways.rows, other.ways.rows)
            assert np.array_equal(one.inter, other.inter)


@pytest.mark.parametrize("size", range(3, 17))
def test_the_rings_of_a_mesh_use_every_link_equally_often(size: int) -> None:
    """Each ring passes every member once."""
    orders = _orders(list(range(100, 100 + size)), mesh=True)
    assert all(sorted(order) == list(range(100, 100 + size)) for order in orders)
    used = Counter(link for order in orders for link in pairwise([*order, order[0]]))
    assert len(used) == size * (size - 1)
    assert len(set(used.values())) == 1
