"""The double binary tree, pipelined, and NVLink SHARP, whose switches add up and multicast."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distsim.collectives.members import Members, Routes, joined
from distsim.collectives.plan import NOTHING, Loads, PlannedMessage, PlanPhase, TransferCost

# -- The double binary tree: a reduction up and a broadcast down, pipelined, on two trees that share the
# payload.
#
# A node that is inside one tree is a leaf of the other, so all NICs carry the same (Sanders, Speck, Traeff
# 2009; NCCL src/graph/trees.cc). Inside a node, members hang in a chain from the one nearest to the tree's
# NIC.


def _binary_tree(size: int) -> list[int]:
    """Return the parent of each of *size* nodes, -1 at the root (ncclGetBtree)."""
    parents = [-1]
    for rank in range(1, size):
        bit = rank & -rank
        up = (rank ^ bit) | (bit << 1)
        parents.append(up if up < size else rank ^ bit)
    return parents


def double_tree(size: int) -> tuple[list[int], list[int]]:
    """Return each rank's parents in both trees (ncclGetDtree). The second tree is the mirrored first one, or the
    shifted one if *size* is odd.
    """
    first = _binary_tree(size)
    if size % 2:
        second = [0] * size
        for rank, parent in enumerate(first):
            second[(rank + 1) % size] = -1 if parent < 0 else (parent + 1) % size
        return first, second
    mirrored = [-1 if parent < 0 else size - 1 - parent for parent in first]
    return first, mirrored[::-1]


@dataclass(frozen=True, eq=False, slots=True)
class _Shape:
    """A tree over nodes."""

    parents: NDArray[np.int64]
    depth: NDArray[np.int64]
    """Depth of each node; 0 for the root."""
    order: NDArray[np.int64]
    """Nodes, children before parents."""


@functools.lru_cache(maxsize=256)
def _shapes(size: int) -> tuple[_Shape, _Shape]:
    """Return the two trees over *size* nodes."""
    shapes = []
    for parents in map(np.array, double_tree(size)):
        depth, above = np.zeros(size, dtype=np.int64), parents
        while (above >= 0).any():
            depth += above >= 0
            above = np.where(above >= 0, parents[above], -1)
        shapes.append(_Shape(parents, depth, np.argsort(-depth, kind="stable")))
    return shapes[0], shapes[1]


@dataclass(frozen=True, slots=True)
class Tree:
    """One tree over all members: its edges, children before parents."""

    child: NDArray[np.int64]
    parent: NDArray[np.int64]
    depth: NDArray[np.int64]
    """Depth of each edge's child below the root."""
    up: Routes
    down: Routes
    inter: NDArray[np.bool_]
    """Edges that lead to another node."""
    root: int


def trees(group: Members) -> list[Tree]:
    """Return all trees of a group, which share the payload equally: two per NIC, or two in all on one node."""
    result: list[Tree] = group.cached("trees", lambda: _trees(group))
    return result


def _trees(group: Members) -> list[Tree]:
    pair = _shapes(len(group.domains))
    alone = group.per_domain if group.cluster.node.nvlink == "mesh" else 1
    numbers = range(len(group.gates[0]) if len(group.domains) > 1 else alone)
    return [_tree(group, shape, number, side) for number in numbers for side, shape in enumerate(pair)]


def _tree(group: Members, shape: _Shape, number: int, side: int) -> Tree:
    """Return the tree: the members of a node form a chain from the one nearest to the NIC, and the chain heads form the
    tree."""
    domains, mesh = group.domains, group.cluster.node.nvlink == "mesh"
    gates = [gates[number if len(domains) > 1 else 0] for gates in group.gates]
    if len(domains) > 1:
        heads = [gate.near[side % len(gate.near)] for gate in gates]
        starts = np.array([domain.index(head) for domain, head in zip(domains, heads, strict=True)])
    else:
        starts = np.array([number if mesh else len(domains[0]) - 1 if side and len(domains[0]) else 0])
    members = np.array([member for domain in domains for member in domain])
    widths = np.array([len(domain) for domain in domains])
    firsts = np.cumsum(widths) - widths

    def in_chain(node: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.int64]:
        # Where GPUs are linked pairwise, 0, 1, -1, 2, -2, ... from the head: all heads' chains use each link alike.
        step = (position + 1) // 2 * np.where(position % 2, 1, -1) if mesh else position
        result: NDArray[np.int64] = members[firsts[node] + (starts[node] + step) % widths[node]]
        return result

    node = np.repeat(shape.order, widths[shape.order])
    ends = np.cumsum(widths[shape.order])
    chain_position = np.repeat(ends, widths[shape.order]) - 1 - np.arange(len(node))  # from the chain's end to its head
    edge = (chain_position > 0) | (shape.parents[node] >= 0)
    node, chain_position = node[edge], chain_position[edge]
    above = np.where(chain_position > 0, node, shape.parents[node])
    child, parent = in_chain(node, chain_position), in_chain(above, np.maximum(chain_position - 1, 0))
    out = np.array([-1 if gate.rail is None else gate.rail for gate in gates])
    rails = np.where(chain_position > 0, -1, out[node])
    both = group.ways(np.concatenate([child, parent]), np.concatenate([parent, child]), np.concatenate([rails, rails]))
    up, down = Routes(both.rows[: len(child)]), Routes(both.rows[len(child) :])
    root = int(in_chain(shape.order[-1:], np.zeros(1, dtype=np.int64))[0])
    return Tree(child, parent, shape.depth[node] + chain_position, up, down, group.leaves_domain(child, parent), root)


def tree_loads(group: Members, up: bool = True, down: bool = True) -> Loads:
    """Return bytes over each link per byte of an all_reduce's payload, on its way up and down or one of these."""

    def make() -> Loads:
        every = trees(group)
        ways = [ways for tree in every for ways, there in ((tree.up, up), (tree.down, down)) if there]
        return group.loads_of(joined(ways), 1.0 / len(every))

    result: Loads = group.cached(("tree loads", up, down), make)
    return result


def tree_hops(group: Members) -> tuple[int, int]:
    """Return the number of hops inside nodes and between nodes from the farthest leaf to the root."""
    domains = group.domains
    inside = max(len(domain) for domain in domains) - 1
    between = max(int(shape.depth.max()) for shape in _shapes(len(domains)))
    return inside, between


IDEAL_PIECES, MAX_PIECES = 16, 256


def pieces_of(nbytes: float, cost: TransferCost) -> int:
    """Return the number of pieces of a payload; the latency of the first piece is not hidden."""
    if math.isinf(cost.piece_bytes):
        return IDEAL_PIECES
    return round(min(max(nbytes / cost.piece_bytes, 1.0), MAX_PIECES))


def _parts_of(pieces: int, cost: TransferCost) -> int:
    """Return into how many parts a piece is divided inside a node, where each part is passed on as soon as it
    arrives.
    """
    return max(1, IDEAL_PIECES // pieces, min(cost.parts, MAX_PIECES // pieces)) if cost.cut_through else 1


@dataclass(frozen=True, slots=True)
class _Level:
    """Seconds per byte of the payload on each link, all trees together."""

    up: NDArray[np.float64]
    down: NDArray[np.float64]

    def of(self, up: bool, pieces: int) -> NDArray[np.float64]:
        """Return which piece passes a hop: the only one, or one of many."""
        own, other = (self.up, self.down) if up else (self.down, self.up)
        return own + other * min((pieces - 1) / (IDEAL_PIECES - 1), 1.0)


@dataclass(frozen=True, slots=True)
class _Hops:
    """Paths from each member to its root and back."""

    ways: NDArray[np.float64]
    """Distinct paths (rows). Columns: hops, latency and seconds per byte inside nodes; then the same between nodes."""
    level: _Level


def _level(group: Members) -> _Level:
    def make() -> _Level:
        levels = []
        for up in (True, False):
            loads = tree_loads(group, up=up, down=not up)
            level = np.zeros(len(group.capacity))
            level[loads.links] = loads.weights / group.capacity[loads.links]
            levels.append(level)
        return _Level(levels[0], levels[1])

    tree_levels: _Level = group.cached("tree level", make)
    return tree_levels


def _hops(group: Members, pieces: int) -> _Hops:
    def make() -> _Hops:
        level = _level(group)
        every: list[NDArray[np.float64]] = []
        for tree in trees(group)[:2]:
            ways = np.zeros((group.size, 6))
            up = _steps(tree, tree.up, group, level.of(True, pieces))
            down = _steps(tree, tree.down, group, level.of(False, pieces))
            by_depth = np.argsort(tree.depth, kind="stable")
            for edges in np.split(by_depth, np.cumsum(np.bincount(tree.depth))[:-1]):
                ways[tree.child[edges]] = ways[tree.parent[edges]] + up[edges] + down[edges]
            every.append(ways)
        return _Hops(_distinct(np.concatenate(every)), level)

    result: _Hops = group.cached(("tree hops", pieces), make)
    return result


def _distinct(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distinct rows."""
    alike = rows.view(f"V{rows.itemsize * rows.shape[1]}").ravel().tolist()
    return rows[list({row: i for i, row in enumerate(alike)}.values())]


def _steps(tree: Tree, ways: Routes, group: Members, level: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cost that each edge adds to a path, with the columns of `_Hops.ways`."""
    step = np.stack([np.ones(len(tree.child)), ways.total(group.links.latency_s), ways.largest(level)], axis=1)
    return np.where(np.repeat([[False, True]], 3, axis=1) == tree.inter[:, None], np.hstack([step, step]), 0.0)


def tree_phase(group: Members, nbytes: float, cost: TransferCost) -> PlanPhase:
    """Return the pipelined double tree as one fluid phase: the first piece goes up and down, and the others follow.

    T = latency of one piece + (1 - 1 / pieces) * bytes / slowest rate. A hop takes the links' latency; the
    library's own latency is part of its start-up time.
    """
    pieces = pieces_of(nbytes, cost)
    parts = _parts_of(pieces, cost)
    if len(group.domains) == 1:
        pieces, parts = pieces * parts, 1
    hops = _hops(group, pieces)
    loads = group.with_cost(tree_loads(group), cost)
    least = 1.0 / cost.edge_bytes_per_s
    flow_s = nbytes * max(group.slowest_s_per_byte(loads), least)
    inside, between = hops.ways[:, :3].T, hops.ways[:, 3:].T
    journey_s = inside[1] * cost.intra_links + between[1]
    near = np.maximum(inside[2] * cost.wire, inside[0] * cost.least_s(inter=False))
    # Of a piece in parts the first goes through a node's chain, up or down, and the others follow over its last edge.
    near = near / parts + (1.0 - 1.0 / parts) * near / np.maximum(inside[0] / 2.0, 1.0)
    far = np.maximum(between[2] * cost.net_wire, between[0] * cost.least_s(inter=True))
    every_s = journey_s + nbytes / pieces * (near + far)
    longest = int(every_s.argmax())
    spare_s = max(float(every_s[longest]) - flow_s / pieces, 0.0)
    if flow_s <= 0.0:
        return PlanPhase(loads, nbytes, cost.edge_bytes_per_s, spare_s, group.streams_at(cost))
    # The links between nodes are busy one way only while the first piece has not been up and the last is coming down:
    # half of that time others can have.
    stage_s = between[1] + nbytes / pieces * far
    if len(group.domains) == 1:
        stage_s = inside[1] * cost.intra_links + nbytes / pieces * near
    spread_s = min(max(float(stage_s[longest]) - flow_s / pieces, 0.0), spare_s) / 2
    # The first piece is half of its way inside a node before it comes to these links, and the last half after them.
    early_s = (spare_s - spread_s) / 2 if len(group.domains) > 1 else 0.0
    streams = group.streams_at(cost)
    end_s = spare_s - spread_s - early_s
    if spread_s <= _MUCH * flow_s:
        flow = PlanPhase(loads, nbytes, nbytes / (flow_s + spread_s), end_s, streams)
        return PlanPhase(NOTHING, 0.0, latency_s=early_s, then=(flow,))
    # On the way up only, then both ways, then down only.
    cap = nbytes / flow_s
    one_way = min(nbytes, nbytes * spread_s / flow_s)
    between_s = spread_s - one_way / cap  # every piece is on its way: neither up nor down is busy
    down = PlanPhase(group.with_cost(tree_loads(group, up=False), cost), one_way, cap, end_s, streams)
    both = PlanPhase(loads, nbytes - one_way, cap, between_s, streams, (down,))
    up = PlanPhase(group.with_cost(tree_loads(group, down=False), cost), one_way, cap, 0.0, streams, (both,))
    return PlanPhase(NOTHING, 0.0, latency_s=early_s, then=(up,))


_MUCH = 0.03
"""Share of a tree's time below which traffic in only one direction is not modelled as a flow of its own."""


def one_way_phase(group: Members, nbytes: float, cost: TransferCost) -> PlanPhase:
    """Return a broadcast or a reduction over both trees: half of an all_reduce's journey."""
    loads = group.with_cost(tree_loads(group), cost)
    both = tree_phase(group, nbytes, cost)
    flow_s = nbytes * max(group.slowest_s_per_byte(loads), 1.0 / cost.edge_bytes_per_s)
    latency_s = max(both.alone_s(group.capacity) - flow_s, 0.0) / 2
    return PlanPhase(loads, nbytes, cost.edge_bytes_per_s, latency_s, group.streams_at(cost))


_Way = tuple[tuple[int, ...], float, float, float]


def tree_messages(group: Members, nbytes: float, cost: TransferCost) -> list[PlannedMessage]:
    """Return the double tree piece by piece: up when all children's pieces are in, down when the parent's is."""
    messages: list[PlannedMessage] = []
    every, level = trees(group), _level(group)
    pieces = pieces_of(nbytes, cost)
    size = nbytes / len(every) / pieces
    streams = group.streams / len(every)
    loads = group.with_cost(tree_loads(group), cost)
    flow_s = nbytes * max(group.slowest_s_per_byte(loads), 1.0 / cost.edge_bytes_per_s)

    def sizes(tree: Tree, ways: Routes, going_up: bool) -> Iterator[_Way]:
        """Yield links, bytes, latency and most bytes a second of each edge, one direction."""
        slowest, alone_s = ways.largest(level.of(going_up, pieces)).tolist(), ways.total(group.links.latency_s).tolist()
        for i, inter in enumerate(tree.inter.tolist()):
            wire = cost.net_wire if inter else cost.wire
            slow = slowest[i]
            least = cost.least_s(inter)
            cap = min(1.0 / slow if slow else math.inf, wire / least if least else math.inf) / len(every)
            yield ways.links(i), size * wire, cost.hop_s(alone_s[i], inter), cap

    parts = _parts_of(pieces, cost)
    if len(group.domains) == 1:
        pieces, parts, size = pieces * parts, 1, size / parts
    for number, tree in enumerate(every):
        child_of, parent_of, inter = tree.child.tolist(), tree.parent.tolist(), tree.inter.tolist()
        ways = zip(sizes(tree, tree.up, True), sizes(tree, tree.down, False), strict=True)
        edges = list(zip(child_of, parent_of, inter, ways, strict=True))

        def send(way: _Way, after: list[list[int]], whole: bool, queue: tuple[int, int, int]) -> list[list[int]]:
            """Send a piece over an edge as soon as all of its inputs have arrived."""
            links, nbytes, latency_s, cap = way
            if whole:
                waits = tuple(dict.fromkeys(itertools.chain(*after)))
                messages.append(PlannedMessage(links, nbytes, latency_s, cap, waits, queue, streams))
                return [[len(messages) - 1]] * parts
            result = []
            for one in after:
                result.append([len(messages)])
                messages.append(PlannedMessage(links, nbytes / parts, latency_s, cap, tuple(one), queue, streams))
            return result

        for piece in range(pieces):
            before = (len(messages),) if piece else ()
            if piece:  # a member has as many buffers as keep its links busy both ways, and no more
                messages.append(PlannedMessage((), size, 0.0, size * pieces / flow_s, queue=(number, -1, -1)))
            arrived: dict[int, list[list[int]]] = {}

            def there(member: int, arrived: dict[int, list[list[int]]] = arrived) -> list[list[int]]:
                return arrived.setdefault(member, [[] for _ in range(parts)])

            for child, parent, leaves, (up, _down) in edges:
                has = there(child) if any(there(child)) else [list(before) for _ in range(parts)]
                sent = send(up, has, leaves, (number, child, parent))
                for had, came in zip(there(parent), sent, strict=True):
                    had += came
            ready = {tree.root: there(tree.root)}
            for child, parent, leaves, (_up, down) in edges[::-1]:
                ready[child] = send(down, ready[parent], leaves, (number, parent, child))
    return messages


# -- NVLink SHARP: the NVSwitch adds up what the GPUs hold and multicasts the result; between nodes, a tree
# on top.

_RADIX = 32
"""Number of downward ports of a switch with 64 ports, which determines the depth of the fabric's tree."""
_SWITCH_S = 0.5e-6
"""Time in which a switch adds up data on its way up, or copies it on its way down: an estimate of a few times Quantum's
130 ns."""


def _switch_loads(group: Members, op: str) -> Loads:
    """Return the loads of an NVLS operation on the links to the NVSwitch.

    Each of n GPUs owns one n-th of the buffer. The switch sums it up from all GPUs (one n-th arrives, the whole
    buffer leaves) and multicasts it to all (one n-th leaves, the whole buffer arrives). So a GPU's link carries 1 +
    1/n of the buffer. Above eight GPUs the load is taken as 2 (n - 1) / n: 8 and 72 GPUs reach the same measured bus
    bandwidth (835 GB/s on B200 and GB200).
    """

    def make() -> Loads:
        size = max(2, group.per_domain)
        both = 1.0 + 1.0 / size if size <= 8 else 9.0 / 14.0 * 2.0 * (size - 1) / size
        out = {"all_reduce": both, "all_gather": 1.0 / size, "reduce_scatter": 1.0}.get(op, 1.0)
        back = {"all_reduce": both, "all_gather": 1.0, "reduce_scatter": 1.0 / size}.get(op, 1.0)
        paths: list[tuple[tuple[int, ...], float]] = []
        for domain in group.domains:
            for member, after in zip(domain, [*domain[1:], domain[0]], strict=True):
                links = group.route(member, after)
                if links:
                    paths += [((links[0],), out), ((links[-1],), back)]
        return group.loads(paths)

    loads: Loads = group.cached(("nvls loads", op), make)
    return loads


def nvls_phase(group: Members, op: str, nbytes: float, cost: TransferCost) -> PlanPhase:
    """Return a phase of reduction and multicast in the NVSwitch; between nodes the fabric's switches reduce (SHARP)."""
    many = len(group.domains) > 1
    inside = _switch_loads(group, op)
    loads: Loads = group.cached(("sharp loads", op), lambda: _fabric_loads(group, inside)) if many else inside
    latency_s = 2 * cost.hop_s(group.cluster.node.nvlink_latency_s, False)
    if many:
        latency_s += 2 * cost.hop_s(group.cluster.node.nic_latency_s, True)
        latency_s += 2 * math.log(len(group.domains), _RADIX) * _SWITCH_S
    return PlanPhase(group.with_cost(loads, cost), nbytes, cost.edge_bytes_per_s, latency_s, group.streams_at(cost))


def _fabric_loads(group: Members, inside: Loads) -> Loads:
    """Return *inside* plus the loads on the fabric: each GPU's NIC sends that GPU's part of the node's sum once, and
    receives the result once.
    """
    total = np.zeros(len(group.capacity))
    total[inside.links] += inside.weights
    gates = len(group.gates[0])
    for index in range(len(group.domains)):
        after = (index + 1) % len(group.domains)
        for number in range(gates):
            here, there = group.gates[index][number], group.gates[after][number]
            links = group.route(here.near[0], there.near[0], here.rail)
            total[[link for link in links if group.links.outside[link]]] += 1.0 / gates
    used = np.flatnonzero(total)
    return Loads(used, total[used])


def nvls_tree_phase(group: Members, nbytes: float, cost: TransferCost) -> PlanPhase:
    """Return a phase in which NVLS inside the nodes and the double tree between them form one pipeline."""

    def make() -> Loads:
        switch, tree = _switch_loads(group, "all_reduce"), tree_loads(group)
        total = np.zeros(len(group.capacity))
        outside = tree.links[group.links.outside[tree.links]]
        total[outside] = tree.weights[group.links.outside[tree.links]]
        total[switch.links] += switch.weights
        used = np.flatnonzero(total)
        return Loads(used, total[used])

    loads: Loads = group.cached("nvls tree loads", make)
    _, between = tree_hops(group)
    hop_s = cost.hop_s(group.cluster.node.nic_latency_s, True)
    latency_s = 2 * cost.hop_s(group.cluster.node.nvlink_latency_s, False) + 2 * between * hop_s
    return PlanPhase(group.with_cost(loads, cost), nbytes, cost.edge_bytes_per_s, latency_s, group.streams_at(cost))
