"""Rings, trees and the rest as graphs over a cluster."""

from __future__ import annotations

import pytest
import simpy

from distsim.cluster import load_cluster
from distsim.collectives.algorithms.direct import (
    all_to_all_loads,
    even_pairs,
    pair_loads,
    rooted_pairs,
    split_pairs,
)
from distsim.collectives.algorithms.ring import Shape, ring_loads, rings_of
from distsim.collectives.algorithms.tree import double_tree, tree_loads, trees
from distsim.collectives.members import LinkArrays, Members
from distsim.errors import UsageError
from distsim.network import FluidNetwork, Transfer


def group(preset: str, every: int = 1) -> Members:
    """All devices of a preset, or every so many."""
    cluster = load_cluster(preset)
    return Members(cluster, tuple(cluster.devices[::every]), 0, LinkArrays(cluster))


@pytest.mark.parametrize(
    "preset", ["dgx-h100:1", "dgx-h100:3", "dgx-a100:4", "polaris:3", "gcp-a3high:2", "alps-gh200:2", "mi300x:3"]
)
def test_every_ring_visits_every_member_once(preset: str) -> None:
    """Following a ring's edges leads through all members and back."""
    members = group(preset)
    for ring in rings_of(members):
        after = dict(zip(ring.src, ring.dst, strict=True))
        seen, at = [], 0
        for _ in ring.src:
            seen.append(at)
            at = after[at]
        assert at == 0
        assert sorted(seen) == list(range(members.size))


@pytest.mark.parametrize(
    ("preset", "every"), [("dgx-h100:1", 4), ("dgx-a100:2", 8), ("ethernet-cpu:2", 1), ("alps-gh200:2", 5)]
)
def test_the_loads_of_one_transfer_are_those_of_many(preset: str, every: int) -> None:
    """Counted over its own few links, they are what counting over the whole cluster gives."""
    members = group(preset, every)
    loads = pair_loads(members)
    expected = members.loads([(members.route(0, 1), 1.0)])
    assert len(loads.links) > 1
    assert (loads.links.tolist(), loads.weights.tolist()) == (expected.links.tolist(), expected.weights.tolist())
    assert (loads.links.dtype, loads.weights.dtype) == (expected.links.dtype, expected.weights.dtype)


@pytest.mark.parametrize("preset", ["dgx-h100:4", "dgx-a100:4", "snellius-h100:4"])
def test_rings_load_all_nics_alike_on_their_own_rail(preset: str) -> None:
    """Between nodes, each NIC carries the same share, and nothing crosses a spine."""
    members = group(preset)
    loads = ring_loads(members)
    links = members.cluster.links
    nics = [weight for link, weight in zip(loads.links, loads.weights, strict=True) if links[int(link)].kind == "nic"]
    assert len(nics) == 2 * members.cluster.node.num_nics * members.num_nodes
    assert nics == pytest.approx([1 / members.cluster.node.num_nics] * len(nics))


@pytest.mark.parametrize("preset", ["mi300x:2", "mi300x:4", "snellius-h100:2"])
def test_rings_between_nodes_use_all_pairs_of_a_mesh(preset: str) -> None:
    """With a NIC a GPU, each ring enters and leaves a node elsewhere, and no pair of GPUs carries more than one of
    them: 2 x 8 MI300X were five times too slow when they did."""
    members = group(preset)
    loads = ring_loads(members)
    links, rings = members.cluster.links, len(rings_of(members))
    pairs = [
        weight for link, weight in zip(loads.links, loads.weights, strict=True) if links[int(link)].kind == "nvlink"
    ]
    assert len(pairs) == members.num_nodes * rings * (rings - 1)
    assert pairs == pytest.approx([1 / rings] * len(pairs))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13, 64, 270])
def test_double_trees_are_trees_and_complement_each_other(size: int) -> None:
    """Both reach every node from one root; none has more than two children; inside one is a leaf of the
    other."""
    both = double_tree(size)
    inner: list[set[int]] = []
    for parents in both:
        assert parents.count(-1) == 1
        for node in range(size):
            at, steps = node, 0
            while parents[at] >= 0:
                at, steps = parents[at], steps + 1
                assert steps <= size
        children = [parents.count(node) for node in range(size)]
        assert max(children) <= 2
        inner.append({node for node in range(size) if children[node]})
    if size > 2 and size % 2 == 0:
        assert not inner[0] & inner[1]


def test_trees_span_all_members() -> None:
    """Each tree has one branch fewer than members, and no member two parents."""
    members = group("dgx-h100:4")
    for tree in trees(members):
        children = tree.child
        assert len(children) == len(set(children)) == members.size - 1
        assert tree.root not in children
    assert len(tree_loads(members).links) > 0


def test_sampled_routes_keep_the_ends_exact() -> None:
    """All-to-all on many ranks samples routes, but every NIC still carries exactly its share."""
    members = group("dgx-h100:32")
    loads = all_to_all_loads(members)
    links = members.cluster.links
    nics = [weight for link, weight in zip(loads.links, loads.weights, strict=True) if links[int(link)].kind == "nic"]
    assert len(nics) == 2 * 8 * 32
    assert nics == pytest.approx([members.size - 8] * len(nics), rel=1e-6)


@pytest.mark.parametrize(
    ("op", "steps", "moved"), [("all_reduce", 14, 1.75), ("all_gather", 7, 0.875), ("broadcast", 7, 1.0)]
)
def test_shapes(op: str, steps: int, moved: float) -> None:
    """Steps and bytes over an edge of a ring of eight."""
    assert Shape.of(op, 8, 1.0) == Shape(steps, moved)


def test_hierarchical_is_quicker_than_a_ring_over_slow_nics() -> None:
    """Inside first, then a share of each across: fewer hops between nodes than one long ring."""
    cluster = load_cluster("dgx-h100:8")
    times = {}
    for algo in ("ring", "hierarchical"):
        env = simpy.Environment()
        network = FluidNetwork(env, cluster, algo=algo, nccl_version="ideal")
        times[algo] = env.run(network.collective(Transfer("all_reduce", "nccl", tuple(cluster.devices), 1 << 20))).end_s
    assert times["hierarchical"] < 0.5 * times["ring"]


def test_a_choice_that_is_not_there_is_refused_with_the_reason() -> None:
    """NVLink SHARP on an A100 is a mistake; a tree in a broadcast is passed over, as NCCL does."""
    cluster = load_cluster("dgx-a100:2")
    env = simpy.Environment()
    transfer = Transfer("all_reduce", "nccl", tuple(cluster.devices), 1 << 20)
    with pytest.raises(UsageError, match="NVLSTree is not available on dgx-a100: no NVLink SHARP"):
        FluidNetwork(env, cluster, algo="nvlstree").collective(transfer)
    with pytest.raises(UsageError, match=r"a version of NCCL such as 2\.27\.3"):
        FluidNetwork(env, cluster, nccl_version="twenty")
    broadcast = Transfer("broadcast", "nccl", tuple(cluster.devices), 1 << 20)
    assert env.run(FluidNetwork(env, cluster, algo="tree").collective(broadcast)).algo == "Ring"


def test_pairs_of_direct_exchanges() -> None:
    """Nobody sends to itself, and what has no bytes is no message."""
    assert even_pairs(3, 5.0) == dict.fromkeys([(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)], 5.0)
    assert rooted_pairs(3, 1, True, 5.0) == {(0, 1): 5.0, (2, 1): 5.0}
    assert rooted_pairs(3, 1, False, 5.0) == {(1, 0): 5.0, (1, 2): 5.0}
    assert split_pairs([[7, 0, 2], [3, 7, 0], [0, 0, 7]]) == {(0, 2): 2.0, (1, 0): 3.0}
    assert split_pairs([[7]]) == split_pairs(()) == even_pairs(1, 5.0) == {}
