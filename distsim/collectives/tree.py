"""The double binary tree: a reduction up and a broadcast down, pipelined, on two trees that share the payload.

A node that is inside one tree is a leaf of the other, so all NICs carry the same (Sanders, Speck, Traeff 2009; NCCL
src/graph/trees.cc). Inside a node, members hang in a chain from the one nearest to the tree's NIC.
"""

from __future__ import annotations

from dataclasses import dataclass

from distsim.collectives.group import Group
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
    """Parents in both trees (ncclGetDtree): the second is the first mirrored, or shifted where *size* is odd."""
    first = _binary_tree(size)
    if size % 2:
        second = [0] * size
        for rank, parent in enumerate(first):
            second[(rank + 1) % size] = -1 if parent < 0 else (parent + 1) % size
        return first, second
    mirrored = [-1 if parent < 0 else size - 1 - parent for parent in first]
    return first, mirrored[::-1]


def _depth(parents: list[int]) -> int:
    deepest = 0
    for node in range(len(parents)):
        depth = 0
        while parents[node] >= 0:
            node, depth = parents[node], depth + 1
        deepest = max(deepest, depth)
    return deepest


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


def trees(group: Group) -> list[Tree]:
    """All trees of a group, each with the same share of the payload: two a NIC, or two in all on one node."""
    found: list[Tree] = group.cached("trees", lambda: _trees(group))
    return found


def _trees(group: Group) -> list[Tree]:
    domains = group.domains
    rails: list[int | None] = [None]
    if len(domains) > 1:
        rails = group.shared_rails
    made: list[Tree] = []
    for rail in rails:
        for side, parents in enumerate(double_tree(len(domains))):
            made.append(_tree(group, domains, parents, rail, side))
    return made


def _tree(group: Group, domains: list[list[int]], parents: list[int], rail: int | None, side: int) -> Tree:
    chains: list[list[int]] = []
    for domain in domains:
        near = [member for member in domain if rail in group.rails(member)] or domain
        gate = near[side % len(near)] if len(domains) > 1 else domain[-side]
        start = domain.index(gate)
        chains.append([*domain[start:], *domain[:start]])
    branches: list[Branch] = []
    depth = {}
    for node in range(len(parents)):
        steps, at = 0, node
        while parents[at] >= 0:
            at, steps = parents[at], steps + 1
        depth[node] = steps
    for node in sorted(depth, key=lambda n: (-depth[n], n)):
        chain = chains[node]
        for child, parent in zip(chain[:0:-1], chain[-2::-1], strict=True):
            branches.append(_branch(group, child, parent, None))
        if parents[node] >= 0:
            branches.append(_branch(group, chain[0], chains[parents[node]][0], rail))
    return Tree(tuple(branches), chains[parents.index(-1)][0])


def _branch(group: Group, child: int, parent: int, rail: int | None) -> Branch:
    up, down = group.route(child, parent, rail), group.route(parent, child, rail)
    return Branch(child, parent, up, down, not group.same_domain(child, parent))


def tree_loads(group: Group) -> Loads:
    """Bytes over each link per byte of an all_reduce's payload."""

    def make() -> Loads:
        every = trees(group)
        share = 1.0 / len(every)
        return group.loads(
            (links, share) for tree in every for branch in tree.branches for links in (branch.up, branch.down)
        )

    found: Loads = group.cached("tree loads", make)
    return found


def tree_hops(group: Group) -> tuple[int, int]:
    """Hops inside nodes and between nodes from the farthest leaf to the root."""
    domains = group.domains
    inside = max(len(domain) for domain in domains) - 1
    between = max(_depth(parents) for parents in double_tree(len(domains)))
    return inside, between


def tree_phase(group: Group, nbytes: float, cost: Cost) -> Phase:
    """The pipelined double tree as one fluid object: the first piece goes up and down, the rest follows behind it."""
    loads = tree_loads(group)
    slowest = max(group.slowest_s_per_byte(loads) * cost.wire, 1.0 / cost.edge_bytes_per_s)
    inside, between = tree_hops(group)
    intra_s, inter_s = _link_latencies(group)
    intra_rate, inter_rate = _hop_rates(group, cost)
    pieces = max(1.0, nbytes / cost.chunk_bytes)
    piece = nbytes / pieces
    journey_s = 2 * inside * (intra_s + cost.intra_hop_s + piece * intra_rate)
    journey_s += 2 * between * (inter_s + cost.inter_hop_s + piece * inter_rate)
    flow_s = nbytes * slowest
    total_s = max(journey_s + (1.0 - 1.0 / pieces) * flow_s, flow_s)
    return Phase(
        Loads(loads.links, loads.weights * cost.wire), nbytes, cost.edge_bytes_per_s, total_s - flow_s
    )


def _link_latencies(group: Group) -> tuple[float, float]:
    def make() -> tuple[float, float]:
        branches = trees(group)[0].branches
        intra = [group.latency_s(branch.up) for branch in branches if not branch.inter]
        inter = [group.latency_s(branch.up) for branch in branches if branch.inter]
        return (sum(intra) / len(intra) if intra else 0.0), (sum(inter) / len(inter) if inter else 0.0)

    found: tuple[float, float] = group.cached("tree latencies", make)
    return found


def _hop_rates(group: Group, cost: Cost) -> tuple[float, float]:
    """Seconds per payload byte over a branch inside a node and between nodes, all trees side by side."""

    def make() -> tuple[float, float]:
        every = trees(group)
        share = 1.0 / len(every)
        ups = group.loads((branch.up, share) for tree in every for branch in tree.branches)
        level = {
            int(k): float(w) / float(group.capacity[k]) for k, w in zip(ups.links, ups.weights, strict=True)
        }
        rates: list[float] = []
        for inter in (False, True):
            some = [
                max((level[link] for link in branch.up), default=0.0)
                for branch in every[0].branches
                if branch.inter == inter
            ]
            rates.append(sum(some) / len(some) if some else 0.0)
        return rates[0], rates[1]

    intra, inter = group.cached("tree rates", make)
    floor = 1.0 / cost.edge_bytes_per_s
    return max(intra * cost.wire, floor), max(inter * cost.wire, floor)


def tree_messages(group: Group, nbytes: float, cost: Cost) -> list[Message]:
    """The double tree piece by piece: up when all children's pieces are in, down when the parent's is."""
    messages: list[Message] = []
    every = trees(group)
    share = nbytes / len(every)
    pieces = max(1, round(nbytes / cost.chunk_bytes))
    for number, tree in enumerate(every):
        size = share / pieces
        for _ in range(pieces):
            arrived: dict[int, list[int]] = {}
            for branch in tree.branches:
                after = tuple(arrived.get(branch.child, ()))
                arrived.setdefault(branch.parent, []).append(len(messages))
                messages.append(
                    _message(
                        group, branch.up, branch.inter, size, cost, after, number, branch.child, branch.parent
                    )
                )
            ready: dict[int, tuple[int, ...]] = {tree.root: tuple(arrived.get(tree.root, ()))}
            for branch in reversed(tree.branches):
                after = ready[branch.parent]
                ready[branch.child] = (len(messages),)
                messages.append(
                    _message(
                        group,
                        branch.down,
                        branch.inter,
                        size,
                        cost,
                        after,
                        number,
                        branch.parent,
                        branch.child,
                    )
                )
    return messages


def _message(
    group: Group,
    links: tuple[int, ...],
    inter: bool,
    nbytes: float,
    cost: Cost,
    after: tuple[int, ...],
    number: int,
    src: int,
    dst: int,
) -> Message:
    latency_s = group.latency_s(links) + (cost.inter_hop_s if inter else cost.intra_hop_s)
    return Message(
        links, nbytes * cost.wire, latency_s, cost.edge_bytes_per_s * cost.wire, after, (number, src, dst)
    )
