"""Rings: every rank passes on to the next what it has from the one before.

The rings of a group that spans nodes enter and leave each node by the same rail, one ring a NIC, with rails swapped
between even and odd nodes where a GPU has a NIC of its own (NCCL's "alternate rings", src/graph/connect.cc). Inside
nodes whose GPUs are linked pairwise, rings take different orders so that all pairs carry the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distsim.collectives.group import Group
from distsim.collectives.plan import Cost, Loads, Message, Phase

__all__ = ["Edge", "Shape", "ring_edges", "ring_messages", "ring_phase"]


@dataclass(frozen=True, slots=True)
class Edge:
    """One ring's step from a member to the next: the links, and the share of the payload this ring carries."""

    src: int
    dst: int
    links: tuple[int, ...]
    inter: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """A collective on a ring: *steps* hops for each piece, *edge_bytes* over each edge."""

    steps: int
    edge_bytes: float

    @staticmethod
    def of(op: str, size: int, nbytes: float) -> Shape:
        """all_reduce goes round nearly twice, all_gather and reduce_scatter once; broadcast and reduce are chains."""
        if op == "all_reduce":
            return Shape(2 * (size - 1), 2 * (size - 1) * nbytes / size)
        if op in ("all_gather", "reduce_scatter"):
            return Shape(size - 1, (size - 1) * nbytes / size)
        return Shape(size - 1, nbytes)


def _orders(members: list[int], mesh: bool) -> list[list[int]]:
    if not mesh or len(members) < 3:
        return [members]
    first, rest = members[0], members[1:]
    orders: list[list[int]] = []
    for shift in range(len(rest)):
        order = [first, *rest[shift:], *rest[:shift]]
        orders += [order, [order[0], *order[:0:-1]]]
    return orders


def ring_edges(group: Group) -> list[list[Edge]]:
    """The rings of a group, each a list of edges in order. All rings carry the same share of the payload."""
    found: list[list[Edge]] = group.cached("rings", lambda: _ring_edges(group))
    return found


def _ring_edges(group: Group) -> list[list[Edge]]:
    domains = group.domains
    if len(domains) == 1:
        mesh = group.cluster.node.nvlink == "mesh"
        return [_close(group, [(member, None) for member in order]) for order in _orders(domains[0], mesh)]
    rails = group.shared_rails
    rings: list[list[Edge]] = []
    for k, rail in enumerate(rails):
        partner = rails[k ^ 1] if (k ^ 1) < len(rails) else rail
        stops: list[tuple[int, int | None]] = []
        for index, domain in enumerate(domains):
            enter, leave = (rail, partner) if index % 2 == 0 else (partner, rail)
            first, last = _gates(group, domain, enter, leave)
            inner = [member for member in domain if member not in (first, last)]
            turn = k % len(inner) if inner else 0
            order = [first, *inner[turn:], *inner[:turn]]
            if last != first:
                order.append(last)
            out = leave if len(_near(group, domain, leave)) == 1 else enter
            stops += [(member, None) for member in order[:-1]]
            stops.append((order[-1], out if out is not None else None))
        rings.append(_close(group, stops))
    return rings


def _near(group: Group, domain: list[int], rail: int | None) -> list[int]:
    return [member for member in domain if rail in group.rails(member)] or domain


def _gates(group: Group, domain: list[int], enter: int | None, leave: int | None) -> tuple[int, int]:
    inside, outside = _near(group, domain, enter), _near(group, domain, leave)
    first, last = inside[0], outside[-1]
    if len(inside) > 1 and len(outside) > 1:
        last = inside[-1]
    return first, last


def _close(group: Group, stops: list[tuple[int, int | None]]) -> list[Edge]:
    edges: list[Edge] = []
    for (src, rail), (dst, _) in zip(stops, [*stops[1:], stops[0]], strict=True):
        if src == dst:
            continue
        edges.append(Edge(src, dst, group.route(src, dst, rail), not group.same_domain(src, dst)))
    return edges


def ring_loads(group: Group) -> Loads:
    """Bytes over each link per byte that an edge carries, all rings together."""

    def make() -> Loads:
        rings = ring_edges(group)
        return group.loads((edge.links, 1.0 / len(rings)) for ring in rings for edge in ring)

    found: Loads = group.cached("ring loads", make)
    return found


@dataclass(frozen=True, slots=True)
class _Means:
    """Over the edges of a ring: latency of the links, share of edges between nodes, seconds per byte."""

    latency_s: float
    inter: float
    s_per_byte: float


def _means(group: Group) -> _Means:
    def make() -> _Means:
        ring = ring_edges(group)[0]
        loads = ring_loads(group)
        level = np.zeros(len(group.capacity))
        level[loads.links] = loads.weights / group.capacity[loads.links]
        slow = [float(level[list(edge.links)].max()) if edge.links else 0.0 for edge in ring]
        count = max(1, len(ring))
        return _Means(
            sum(group.latency_s(edge.links) for edge in ring) / count,
            sum(edge.inter for edge in ring) / count,
            sum(slow) / count,
        )

    found: _Means = group.cached("ring means", make)
    return found


def ring_phase(group: Group, shape: Shape, cost: Cost) -> Phase:
    """The ring as one fluid object.

    A piece of q bytes goes through *steps* hops, each at its own edge's latency and rate; meanwhile the slowest edge
    must carry everything. With k pieces a step, all but the first piece's share is hidden behind the slowest edge:
    T = max(J, E/B) for one piece, J + (1 - 1/k) E/B in general, where J is the first piece's journey.
    """
    loads, means = ring_loads(group), _means(group)
    slowest = max(group.slowest_s_per_byte(loads) * cost.wire, 1.0 / cost.edge_bytes_per_s)
    mean = max(means.s_per_byte * cost.wire, 1.0 / cost.edge_bytes_per_s)
    hop_s = means.latency_s + means.inter * cost.inter_hop_s + (1.0 - means.inter) * cost.intra_hop_s
    step_bytes = shape.edge_bytes / max(1, shape.steps)
    pieces = max(1.0, step_bytes / cost.chunk_bytes)
    journey_s = shape.steps * (hop_s + step_bytes / pieces * mean)
    flow_s = shape.edge_bytes * slowest
    total_s = max(journey_s + (1.0 - 1.0 / pieces) * flow_s, flow_s)
    return Phase(
        Loads(loads.links, loads.weights * cost.wire),
        shape.edge_bytes,
        cost.edge_bytes_per_s,
        total_s - flow_s,
    )


def ring_messages(group: Group, shape: Shape, cost: Cost) -> list[Message]:
    """The ring message by message: at each step, every rank sends the next rank what it has just received."""
    messages: list[Message] = []
    rings = ring_edges(group)
    step_bytes = shape.edge_bytes / max(1, shape.steps) / len(rings)
    for number, ring in enumerate(rings):
        size = len(ring)
        latency = [
            group.latency_s(edge.links) + (cost.inter_hop_s if edge.inter else cost.intra_hop_s)
            for edge in ring
        ]
        base = len(messages)
        for step in range(shape.steps):
            for place, edge in enumerate(ring):
                after = () if step == 0 else (base + (step - 1) * size + (place - 1) % size,)
                messages.append(
                    Message(
                        edge.links,
                        step_bytes * cost.wire,
                        latency[place],
                        cost.edge_bytes_per_s * cost.wire / len(rings),
                        after,
                        (number, edge.src, edge.dst),
                    )
                )
    return messages
