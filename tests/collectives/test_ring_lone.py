"""Rings of groups with one member a node, which are made without a step for each, and of meshes."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from distsim.cluster import load_cluster
from distsim.collectives.algorithms.ring import rings_of
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


@pytest.mark.parametrize("size", range(3, 9))
def test_the_rings_of_a_mesh_use_every_link_equally_often(size: int) -> None:
    """Each ring passes every member once."""
    cluster = load_cluster("mi300x:1")
    members = Members(cluster, tuple(cluster.devices[:size]), 0, LinkArrays(cluster))
    assert all(sorted(ring.src) == sorted(ring.dst) == list(range(size)) for ring in rings_of(members))
    used = Counter(pair for ring in rings_of(members) for pair in zip(ring.src, ring.dst, strict=True))
    assert len(used) == size * (size - 1)
    assert len(set(used.values())) == 1
