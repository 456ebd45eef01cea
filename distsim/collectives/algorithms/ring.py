"""Ring algorithms: every rank passes on to the next one what it received from the previous one.

There are rings over all ranks, and rings inside nodes combined with rings between nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from distsim.collectives.members import Members, Routes, joined
from distsim.collectives.plan import Loads, Overlap, PlannedMessage, PlanPhase, TransferCost

# -- Rings: every rank passes on to the next what it has from the one before.
#
# The rings of a group that spans nodes enter and leave each node by the same rail, one ring a NIC, with
# rails swapped between even and odd nodes where a GPU has a NIC of its own (NCCL's "alternate rings",
# src/graph/connect.cc). Inside nodes whose GPUs are linked pairwise, rings take different orders so that all
# pairs carry the same.


@dataclass(frozen=True, slots=True)
class Ring:
    """One ring's steps, from each member to the next; all rings of a group carry the same share of the payload."""

    src: list[int]
    dst: list[int]
    ways: Routes
    inter: NDArray[np.bool_]
    """Steps that lead to another node."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A collective on a ring: *steps* hops for each piece, *edge_bytes* over each edge."""

    steps: int
    edge_bytes: float

    @staticmethod
    def of(op: str, size: int, nbytes: float) -> Shape:
        """Return the shape of *op*: all_reduce passes nearly twice round the ring, all_gather and reduce_scatter
        once, and broadcast and reduce are chains.
        """
        if op == "all_reduce":
            return Shape(2 * (size - 1), 2 * (size - 1) * nbytes / size)
        if op in ("all_gather", "reduce_scatter"):
            return Shape(size - 1, (size - 1) * nbytes / size)
        return Shape(size - 1, nbytes)


_EIGHT = ("05637214", "04235716", "03275461", "07624153", "02651347", "01736452", "06743125")
"""Seven directed cycles through eight, each of the 56 arcs in exactly one (Tillson 1980: there are such for every even
number but 4 and 6)."""


def _orders(members: list[int], mesh: bool) -> list[list[int]]:
    """Return cycles over pairwise-linked GPUs that use every link equally often."""
    size = len(members)
    if not mesh or size < 3:
        return [members]
    if size == 8:
        return [[members[int(i)] for i in cycle] for cycle in _EIGHT]
    if all(size % divisor for divisor in range(2, size)):
        return [[members[step * i % size] for i in range(size)] for step in range(1, size)]
    if size <= 6:
        return [[members[0], *rest] for rest in itertools.permutations(members[1:])]
    num = size - 1
    zigzag = [(i + 1) // 2 if i % 2 else -i // 2 for i in range(num)]  # 0, 1, -1, 2, -2, ...
    orders = [[members[0], *(members[1 + (shift + step) % num] for step in zigzag)] for shift in range(num)]
    return [way for order in orders for way in (order, order[::-1])]


def rings_of(group: Members) -> list[Ring]:
    """Return the rings of a group."""
    result: list[Ring] = group.cached("rings", lambda: _rings(group))
    return result


def _rings(group: Members) -> list[Ring]:
    domains = group.domains
    if len(domains) == 1:
        mesh = group.cluster.node.nvlink == "mesh"
        return [_close(group, [(member, -1) for member in order]) for order in _orders(domains[0], mesh)]
    if group.per_domain == 1:
        return _rings_of_lone(group)
    rings: list[Ring] = []
    count = len(group.gates[0])
    mesh = group.cluster.node.nvlink == "mesh" and _own_nics(group)
    for k in range(count):
        partner = k ^ 1 if k ^ 1 < count else k
        if mesh:
            partner = (k + count // 2) % count
        stops: list[tuple[int, int]] = []
        doors: dict[int, int] = {}
        for index, domain in enumerate(domains):
            gates = group.gates[index]
            enter, leave = (gates[k], gates[partner]) if index % 2 == 0 else (gates[partner], gates[k])
            if len(domain) == 1:
                doors[domain[0]] = -1 if enter.rail is None else enter.rail
                stops.append((domain[0], -1 if leave.rail is None else leave.rail))
                continue
            if len(enter.near) > 1 and len(leave.near) > 1:
                leave = enter
            first, last = enter.near[0], leave.near[-1]
            inner = [member for member in domain if member not in (first, last)]
            turn = k % len(inner) if inner else 0
            order = [first, *inner[turn:], *inner[:turn]]
            if last != first:
                order.append(last)
            if mesh:
                order = [gates[i].near[0] for i in _path(k, count)]
                order = order if index % 2 == 0 else order[::-1]
            doors[order[0]] = -1 if enter.rail is None else enter.rail
            stops += [(member, -1) for member in order[:-1]]
            stops.append((order[-1], -1 if leave.rail is None else leave.rail))
        rings.append(_close(group, stops, doors))
    return rings


def _rings_of_lone(group: Members) -> list[Ring]:
    """Return the rings of a group whose members are alone in their domains, without a Python loop over the members."""
    src = np.array(group.domains, dtype=np.int64)[:, 0]
    dst = np.roll(src, -1)
    doors = np.broadcast_to(group.doors, (group.size, group.num_gates))[src]
    even, inter = np.arange(len(src)) % 2 == 0, group.leaves_domain(src, dst)
    count, rings = group.num_gates, []
    for k in range(count):
        partner = k ^ 1 if k ^ 1 < count else k
        leaves = np.where(even, doors[:, partner], doors[:, k])
        enters = np.where(even, doors[:, k], doors[:, partner])
        rings.append(Ring(src.tolist(), dst.tolist(), group.ways(src, dst, leaves, np.roll(enters, -1)), inter))
    return rings


def _own_nics(group: Members) -> bool:
    """Return whether every GPU of every node has a NIC of its own, and the number of both is even."""
    return all(
        len(gates) % 2 == 0
        and len(gates) == len(domain)
        and {gate.near[0] for gate in gates} == set(domain)
        and all(len(gate.near) == 1 for gate in gates)
        for gates, domain in zip(group.gates, group.domains, strict=True)
    )


def _path(first: int, size: int) -> list[int]:
    """Return the way through GPUs that are linked pairwise from the *first* to the one half round from it. Those of
    all firsts use every arc once (Williams 1949: 0, 1, -1, 2, -2, ... added to each).
    """
    steps = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(size)]
    return [(first + step) % size for step in steps]


def _close(group: Members, stops: list[tuple[int, int]], doors: Mapping[int, int] | None = None) -> Ring:
    """Return a ring by its *stops*, each with the NIC that it is left by. *doors* are the NICs that nodes are
    entered by, of the members behind them: of an odd number of nodes the last one's and the first one's are on
    different rails.
    """
    steps = [
        (src, dst, rail) for (src, rail), (dst, _) in zip(stops, [*stops[1:], stops[0]], strict=True) if src != dst
    ]
    src, dst = [step[0] for step in steps], [step[1] for step in steps]
    rails = [step[2] for step in steps]
    enters = [*map(doors.get, dst, rails)] if doors else rails
    ways = group.ways(src, dst, rails, enters)
    return Ring(src, dst, ways, group.leaves_domain(src, dst))


def ring_loads(group: Members) -> Loads:
    """Return the bytes on each link per byte that an edge carries, summed over all rings."""

    def make() -> Loads:
        rings = rings_of(group)
        return group.loads_of(joined([ring.ways for ring in rings]), 1.0 / len(rings))

    result: Loads = group.cached("ring loads", make)
    return result


@dataclass(frozen=True, slots=True)
class _Hops:
    """The edges of each ring (rows: rings): latency of the links, seconds for a byte of progress where
    every ring has its fair share of each link, and whether the edge leads to another node (of the first
    ring)."""

    latency_s: NDArray[np.float64]
    s_per_byte: NDArray[np.float64]
    inter: NDArray[np.bool_]


def _hops(group: Members) -> _Hops:
    def make() -> _Hops:
        rings = rings_of(group)
        loads = ring_loads(group)
        level = np.zeros(len(group.capacity))
        level[loads.links] = loads.weights / group.capacity[loads.links]
        slow = np.array([ring.ways.largest(level) for ring in rings])
        return _Hops(rings[0].ways.total(group.links.latency_s), slow, rings[0].inter)

    result: _Hops = group.cached("ring hops", make)
    return result


@dataclass(frozen=True, slots=True)
class _Apart:
    """A ring whose edges are not equally fast, as two: the edges that bound it, and those that wait for them."""

    slow: Loads
    quick: Loads
    early: float
    """Pieces that an edge of the quick ones has to carry before anything has come over a slow one, on average: of
    those behind a slow one the first has its own, the second that one's, too, and so on."""


def _apart(group: Members, slow: NDArray[np.bool_]) -> _Apart:
    def make() -> _Apart:
        rings = rings_of(group)
        parts = []
        for chosen in (slow, ~slow):
            ways = joined([Routes(ring.ways.rows[chosen]) for ring in rings])
            parts.append(group.loads_of(ways, 1.0 / len(rings)))
        size, first = len(slow), int(np.flatnonzero(slow)[0])
        runs = np.diff(np.append(np.flatnonzero(slow), first + size)) - 1
        return _Apart(parts[0], parts[1], float((runs * (runs + 1) / 2).sum() / runs.sum()))

    result: _Apart = group.cached(("ring apart", slow.tobytes()), make)
    return result


def ring_phase(group: Members, shape: Shape, cost: TransferCost) -> PlanPhase:
    """Return the ring as one fluid object.

    A piece (one n-th of the payload) goes through *steps* hops, each at its own edge's latency and rate;
    meanwhile the slowest edge must carry everything, and its last piece must arrive. The longer of the two
    is the time. On equal edges that is the closed form steps * (latency + piece / bandwidth).
    """
    hops = _hops(group)
    loads = group.with_cost(ring_loads(group), cost)
    least = 1.0 / cost.edge_bytes_per_s
    flow_s = shape.edge_bytes * max(group.slowest_s_per_byte(loads), least)
    piece = shape.edge_bytes / max(1, shape.steps)
    each_s = np.where(hops.inter, cost.hop_s(hops.latency_s, True), cost.hop_s(hops.latency_s, False))
    wire = np.where(hops.inter, cost.net_wire, cost.wire)
    s_per_byte = np.maximum(hops.s_per_byte[0] * wire, least)
    # Edges that are nearly as slow do not wait for the slowest: they bound the ring with them.
    slow = s_per_byte >= s_per_byte.max(initial=0.0) * (1.0 - _NEARLY)
    last_s = float(each_s[slow].max(initial=0.0))
    way_s = _longest(each_s + piece * s_per_byte, shape.steps)
    spare_s = way_s - last_s - flow_s
    if slow.all() or flow_s <= 0.0:
        return _even(group, shape, cost, loads, flow_s, last_s, spare_s)
    apart = _apart(group, slow)
    bound, quick = group.with_cost(apart.slow, cost), group.with_cost(apart.quick, cost)
    # Links idle while pieces are on their way: what the slow ones carry of one piece's way comes as fast as it can,
    # the rest evenly, and others have what is left.
    streams = group.streams / float(wire[slow].mean())
    lead, cap = 0.0, cost.edge_bytes_per_s
    if spare_s > 0.0:
        lead = shape.edge_bytes * float(slow.mean())
        cap = min(cap, (shape.edge_bytes - lead) / (spare_s + flow_s * (1.0 - float(slow.mean()))))
    rest = PlanPhase(bound, shape.edge_bytes - lead, cap, last_s, streams)
    slowly = PlanPhase(bound, lead, cost.edge_bytes_per_s, 0.0, streams, (rest,)) if lead else rest
    # The quick edges carry what their own ranks have at once, and then what comes over the slow ones, as it comes. A
    # piece that others hold up there is still in time for the next slow edge, which is busy with those before it.
    every_s = slowly.alone_s(group.capacity) / shape.steps
    early = min(apart.early, shape.steps - 1)
    left = shape.steps - early
    pieces, cap = max(1, round(left)), cost.edge_bytes_per_s
    if pieces > _MOST_PIECES:  # small ones: as good as even
        pieces, cap = 1, min(cap, piece / every_s)
    quick_s = max(group.slowest_s_per_byte(quick), least)
    busy_s = early * piece * quick_s + left * piece * max(quick_s, 1.0 / cap)
    share = 1.0 - float(slow.mean())
    overlap = Overlap(
        quick,
        early * piece,
        left * piece / pieces,
        pieces,
        every_s,
        way_s,
        busy_s,
        share,
        cap,
        group.streams / float(wire[~slow].mean()),
    )
    return replace(slowly, overlap=overlap)


_NEARLY = 0.1
"""Share of the slowest edge's time per byte within which other edges count as equally slow.

With it the fluid and the message model of two nodes of H100s on EFA differ by 0.4 % at most, without it by 1.8 %.
"""
_MOST_PIECES = 16
"""Largest number of steps for which pieces are modelled; with more, a piece is small compared with the whole transfer.
"""
_PARTS = 3
"""Number of times that a ring with long latencies leaves its links to other flows for a while."""
_MUCH = 0.03
"""Share of a ring's time below which pieces in transit are not modelled as flows of their own."""


def _even(
    group: Members, shape: Shape, cost: TransferCost, loads: Loads, flow_s: float, last_s: float, spare_s: float
) -> PlanPhase:
    """Return the phase of a ring whose edges are equal, so that all of them are idle at the same time while pieces are
    in transit.
    """
    spare_s = max(spare_s, 0.0)
    parts = min(_PARTS, shape.steps) if spare_s > _MUCH * flow_s > 0.0 else 1
    then: tuple[PlanPhase, ...] = ()
    for number in range(parts):
        idle_s = spare_s / parts + (0.0 if number else last_s)
        rest = PlanPhase(loads, shape.edge_bytes / parts, cost.edge_bytes_per_s, idle_s, group.streams_at(cost), then)
        then = (rest,)
    return then[0]


def _longest(each_s: NDArray[np.float64], steps: int) -> float:
    """Return the length of the longest path of *steps* edges around a ring: whole rounds minus the cheapest run of
    edges that is left out."""
    size = len(each_s)
    rounds = -(-steps // size)
    left_out = rounds * size - steps
    total = float(each_s.sum()) * rounds
    if not left_out:
        return total
    sums = np.concatenate(([0.0], np.cumsum(np.concatenate((each_s, each_s)))))
    return total - float((sums[left_out : left_out + size] - sums[:size]).min())


def ring_hops(group: Members, shape: Shape) -> tuple[float, float]:
    """Return how many hops of a ring stay inside a node, and how many leave it."""
    inter = float(_hops(group).inter.mean()) * shape.steps
    return shape.steps - inter, inter


def ring_messages(group: Members, shape: Shape, cost: TransferCost) -> list[PlannedMessage]:
    """Return every message of the ring: at each step, every rank sends to the next rank what it has just received.

    Parallel rings are channels. Each gets a fair share of a link, and may use what the others leave.
    """
    messages: list[PlannedMessage] = []
    rings, hops = rings_of(group), _hops(group)
    step_bytes = shape.edge_bytes / max(1, shape.steps) / len(rings)
    streams = group.streams / len(rings)
    for number, ring in enumerate(rings):
        size = len(ring.src)
        ways = [ring.ways.links(i) for i in range(size)]
        inter = ring.inter.tolist()
        wires = [cost.net_wire if one else cost.wire for one in inter]
        alone = ring.ways.total(group.links.latency_s).tolist()
        latency = [cost.hop_s(links_s, one) for links_s, one in zip(alone, inter, strict=True)]
        caps = [
            min(1.0 / slow if slow else math.inf, cost.edge_bytes_per_s * wire) / len(rings)
            for slow, wire in zip(hops.s_per_byte[number].tolist(), wires, strict=True)
        ]
        base = len(messages)
        for step in range(shape.steps):
            for i in range(size):
                after = () if step == 0 else (base + (step - 1) * size + (i - 1) % size,)
                queue = (number, ring.src[i], ring.dst[i])
                nbytes = step_bytes * wires[i]
                messages.append(PlannedMessage(ways[i], nbytes, latency[i], caps[i], after, queue, streams))
    return messages


# -- An all_reduce in three steps: reduce_scatter inside every node, all_reduce across nodes for each share,
# all_gather inside. What frameworks do by hand (2D all_reduce, HSDP); asked for by `--algo hierarchical` in
# plain alpha-beta.


def hierarchical_phases(group: Members, nbytes: float) -> tuple[PlanPhase, ...]:
    """Return the three phases, each with all its rings side by side in lockstep."""
    inner = [domain for domain in group.domains if len(domain) > 1]
    width = min(len(domain) for domain in group.domains)
    outer = [[domain[i] for domain in group.domains] for i in range(width)]
    phases: list[PlanPhase] = []
    if inner:
        phases.append(_phase_on_rings(group, inner, "reduce_scatter", nbytes))
    if len(group.domains) > 1:
        phases.append(_phase_on_rings(group, outer, "all_reduce", nbytes / width))
    if inner:
        phases.append(_phase_on_rings(group, inner, "all_gather", nbytes))
    return tuple(phases)


def _phase_on_rings(group: Members, rings: list[list[int]], op: str, nbytes: float) -> PlanPhase:
    shape = Shape.of(op, max(len(ring) for ring in rings), nbytes)
    hops = [
        group.route(member, after) for ring in rings for member, after in zip(ring, [*ring[1:], ring[0]], strict=True)
    ]
    latency_s = shape.steps * max(group.latency_s(links) for links in hops)
    return PlanPhase(group.loads((links, 1.0) for links in hops), shape.edge_bytes, latency_s=latency_s)
