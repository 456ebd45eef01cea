"""The double binary tree: a reduction up and a broadcast down, pipelined, on two trees that share the
payload.

A node that is inside one tree is a leaf of the other, so all NICs carry the same (Sanders, Speck, Traeff
2009; NCCL src/graph/trees.cc). Inside a node, members hang in a chain from the one nearest to the tree's
NIC.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distsim.collectives.members import Members
from distsim.collectives.plan import Cost, Loads, Message, Phase

__all__ = ["double_tree", "tree_loads", "tree_messages", "tree_phase"]


def _binary_tree(size: int) -> list[int]:
    """The parent of each of *size* nodes, -1 at the root (ncclGetBtree)."""
    parents = [-1]
    for rank in range(1, size):
        bit = rank & -rank
        up = (rank ^ bit) | (bit << 1)
        parents.append(up if up < size else rank ^ bit)
    return parents


def double_tree(size: int) -> tuple[list[int], list[int]]:
    """Parents in both trees (ncclGetDtree): the second is the first mirrored, or shifted where *size* is
    odd."""
    first = _binary_tree(size)
    if size % 2:
        second = [0] * size
        for rank, parent in enumerate(first):
            second[(rank + 1) % size] = -1 if parent < 0 else (parent + 1) % size
        return first, second
    mirrored = [-1 if parent < 0 else size - 1 - parent for parent in first]
    return first, mirrored[::-1]


def _depth(parents: list[int]) -> int:
    return max(_depths(parents))


def _depths(parents: list[int]) -> list[int]:
    """Of each node; the root's is 0."""
    found: list[int] = []
    for node in range(len(parents)):
        depth = 0
        while parents[node] >= 0:
            node, depth = parents[node], depth + 1
        found.append(depth)
    return found


@dataclass(frozen=True, slots=True)
class Branch:
    """An edge of one tree: from a member to its parent, and back."""

    child: int
    parent: int
    up: tuple[int, ...]
    down: tuple[int, ...]
    inter: bool


@dataclass(frozen=True, slots=True)
class Tree:
    """One tree over all members, children before parents."""

    branches: tuple[Branch, ...]
    root: int


def trees(group: Members) -> list[Tree]:
    """All trees of a group, each with the same share of the payload: two a NIC, or two in all on one node."""
    found: list[Tree] = group.cached("trees", lambda: _trees(group))
    return found


def _trees(group: Members) -> list[Tree]:
    domains = group.domains
    made: list[Tree] = []
    for number in range(len(group.gates[0]) if len(domains) > 1 else 1):
        for side, parents in enumerate(double_tree(len(domains))):
            made.append(_tree(group, domains, parents, number, side))
    return made


def _tree(group: Members, domains: list[list[int]], parents: list[int], number: int, side: int) -> Tree:
    chains: list[list[int]] = []
    for index, domain in enumerate(domains):
        near = group.gates[index][number].near
        start = domain.index(near[side % len(near)] if len(domains) > 1 else domain[-side])
        chains.append([*domain[start:], *domain[:start]])
    branches: list[Branch] = []
    depth = _depths(parents)
    for node in sorted(range(len(parents)), key=lambda n: (-depth[n], n)):
        chain = chains[node]
        for child, parent in zip(chain[:0:-1], chain[-2::-1], strict=True):
            branches.append(_branch(group, child, parent, None))
        if parents[node] >= 0:
            rail = group.gates[node][number].rail
            branches.append(_branch(group, chain[0], chains[parents[node]][0], rail))
    return Tree(tuple(branches), chains[parents.index(-1)][0])


def _branch(group: Members, child: int, parent: int, rail: int | None) -> Branch:
    up, down = group.route(child, parent, rail), group.route(parent, child, rail)
    return Branch(child, parent, up, down, not group.same_domain(child, parent))


def tree_loads(group: Members) -> Loads:
    """Bytes over each link per byte of an all_reduce's payload."""

    def make() -> Loads:
        every = trees(group)
        share = 1.0 / len(every)
        return group.loads(
            (links, share) for tree in every for branch in tree.branches for links in (branch.up, branch.down)
        )

    found: Loads = group.cached("tree loads", make)
    return found


def tree_hops(group: Members) -> tuple[int, int]:
    """Hops inside nodes and between nodes from the farthest leaf to the root."""
    domains = group.domains
    inside = max(len(domain) for domain in domains) - 1
    between = max(_depth(parents) for parents in double_tree(len(domains)))
    return inside, between


MIN_PIECES, MAX_PIECES = 16, 256


def pieces_of(nbytes: float, cost: Cost) -> int:
    """How many pieces a payload moves in: what the first one takes on its way is not hidden by the others."""
    return round(min(max(nbytes / cost.piece_bytes, MIN_PIECES), MAX_PIECES))


@dataclass(frozen=True, slots=True)
class _Hops:
    """The ways from each member to its root and back."""

    ways: NDArray[np.float64]
    """Distinct ways (rows). Columns: hops, latency and seconds per byte inside nodes; then between them."""
    level: dict[int, float]
    """Seconds per byte of the payload on each link, all trees and both directions together."""


def _hops(group: Members) -> _Hops:
    def make() -> _Hops:
        loads = tree_loads(group)
        level = dict(zip(loads.links.tolist(), (loads.weights / group.capacity[loads.links]).tolist(), strict=True))
        rows: list[list[float]] = []
        for tree in trees(group)[:2]:
            ways = {tree.root: [0.0] * 6}
            for branch in reversed(tree.branches):
                way = list(ways[branch.parent])
                for links in (branch.up, branch.down):
                    start = 3 if branch.inter else 0
                    way[start] += 1.0
                    way[start + 1] += group.latency_s(links)
                    way[start + 2] += max([level[link] for link in links]) if links else 0.0
                ways[branch.child] = way
            rows.extend(ways.values())
        return _Hops(np.unique(np.array(rows), axis=0), level)

    found: _Hops = group.cached("tree hops", make)
    return found


def tree_phase(group: Members, nbytes: float, cost: Cost) -> Phase:
    """The pipelined double tree as one fluid object: the first piece goes up and down, the others follow
    close behind.

    T = journey of one piece + (1 - 1 / pieces) * bytes / slowest rate.
    """
    hops = _hops(group)
    loads = group.with_cost(tree_loads(group), cost)
    least = 1.0 / cost.edge_bytes_per_s
    flow_s = nbytes * max(group.slowest_s_per_byte(loads), least)
    pieces = pieces_of(nbytes, cost)
    inside, between = hops.ways[:, :3].T, hops.ways[:, 3:].T
    journey_s = inside[1] * cost.intra_links + inside[0] * cost.intra_hop_s
    journey_s = journey_s + between[1] + between[0] * cost.inter_hop_s
    slow = np.maximum(inside[2] * cost.wire, inside[0] * least)
    slow = slow + np.maximum(between[2] * cost.net_wire, between[0] * least)
    total_s = float((journey_s + nbytes / pieces * slow).max()) + (1.0 - 1.0 / pieces) * flow_s
    return Phase(loads, nbytes, cost.edge_bytes_per_s, max(total_s - flow_s, 0.0))


def tree_messages(group: Members, nbytes: float, cost: Cost) -> list[Message]:
    """The double tree piece by piece: up when all children's pieces are in, down when the parent's is."""
    messages: list[Message] = []
    every, hops = trees(group), _hops(group)
    pieces = pieces_of(nbytes, cost)
    size = nbytes / len(every) / pieces

    def send(tree: int, src: int, dst: int, branch: Branch, links: tuple[int, ...], after: tuple[int, ...]) -> None:
        slow = max((hops.level[link] for link in links), default=0.0)
        wire = cost.net_wire if branch.inter else cost.wire
        cap = min(1.0 / slow if slow else math.inf, cost.edge_bytes_per_s * wire) / len(every)
        latency_s = cost.hop_s(group.latency_s(links), branch.inter)
        messages.append(Message(links, size * wire, latency_s, cap, after, (tree, src, dst)))

    for number, tree in enumerate(every):
        for _ in range(pieces):
            arrived: dict[int, list[int]] = {}
            for branch in tree.branches:
                after = tuple(arrived.get(branch.child, ()))
                arrived.setdefault(branch.parent, []).append(len(messages))
                send(number, branch.child, branch.parent, branch, branch.up, after)
            ready = {tree.root: tuple(arrived.get(tree.root, ()))}
            for branch in reversed(tree.branches):
                after = ready[branch.parent]
                ready[branch.child] = (len(messages),)
                send(number, branch.parent, branch.child, branch, branch.down, after)
    return messages
