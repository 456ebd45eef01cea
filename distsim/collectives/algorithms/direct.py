"""Direct exchanges and the binomial tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distsim.collectives.members import Members, Routes
from distsim.collectives.plan import Loads, PlannedMessage, PlanPhase, TransferCost

# -- Direct exchanges: all-to-all, gather and scatter as one transfer per pair of ranks, and plain sends.

_MAX_PAIRS = 1 << 14
"""Number of pairs above which routes between nodes are sampled: the load of the links at the ends stays exact, and that
of the fabric is evenly spread."""

Pairs = dict[tuple[int, int], float]
"""Bytes by (sender, receiver)."""


def even_pairs(size: int, nbytes: float) -> Pairs:
    """Return the pairs of an exchange in which every rank sends *nbytes* to every other one."""
    return {(src, dst): nbytes for src in range(size) for dst in range(size) if src != dst}


def rooted_pairs(size: int, root: int, to_root: bool, nbytes: float) -> Pairs:
    """Return the pairs of a gather to *root*, or of a scatter from it."""
    return {((rank, root) if to_root else (root, rank)): nbytes for rank in range(size) if rank != root}


def split_pairs(splits: Sequence[Sequence[int]]) -> Pairs:
    """Return the pairs of an uneven exchange; *splits* are the bytes from each rank to each rank."""
    return {
        (src, dst): float(nbytes)
        for src, row in enumerate(splits)
        for dst, nbytes in enumerate(row)
        if nbytes and src != dst
    }


def all_to_all_loads(group: Members) -> Loads:
    """Return bytes over each link per byte that goes from one rank to another."""
    result: Loads = group.cached("all_to_all loads", lambda: group.loads_of(*_even_ways(group)))
    return result


def _even_ways(group: Members) -> tuple[Routes, NDArray[np.float64]]:
    """Return the routes, and the number of pairs that each of them represents."""
    size, domains = group.size, group.domains
    if size * size <= _MAX_PAIRS:
        src, dst = np.divmod(np.arange(size * size), size)
        src, dst = src[src != dst], dst[src != dst]
        return group.ways(src, dst), np.ones(len(src))
    # Inside domains all pairs; between them a shift by whole nodes, and by places inside them, is a permutation: each
    # rank sends and receives once.
    widths = np.array([len(domain) for domain in domains])
    firsts = np.cumsum(widths) - widths
    members = np.concatenate([np.array(domain) for domain in domains])
    index = np.repeat(np.arange(len(domains)), widths)
    position = np.arange(len(members)) - firsts[index]
    width = int(widths.max())
    srcs, dsts, shares = [], [], []

    def shift(nodes: int, places: int, share: float) -> None:
        other = (index + nodes) % len(domains)
        targets = members[firsts[other] + (position + places) % widths[other]]
        kept = members != targets
        if not nodes:  # a smaller domain has met everyone before
            kept &= places < widths[index]
        srcs.append(members[kept])
        dsts.append(targets[kept])
        shares.append(np.full(int(kept.sum()), share))

    for places in range(1, width):
        shift(0, places, 1.0)
    shifts = (len(domains) - 1) * width
    taken = min(shifts, max(8, _MAX_PAIRS // size))
    for number in range(taken):
        nodes, places = divmod((2 * number + 1) * shifts // (2 * taken), width)
        shift(nodes + 1, places, shifts / taken)
    return group.ways(np.concatenate(srcs), np.concatenate(dsts)), np.concatenate(shares)


def rooted_loads(group: Members, root: int, to_root: bool) -> Loads:
    """Return the loads of a gather to *root*, or of a scatter from it."""

    def make() -> Loads:
        others = [member for member in range(group.size) if member != root]
        roots = [root] * len(others)
        return group.loads_of(group.ways(others, roots) if to_root else group.ways(roots, others), 1.0)

    result: Loads = group.cached(("rooted", root, to_root), make)
    return result


def split_loads(group: Members, pairs: Pairs, largest: float) -> Loads:
    """Return the loads on links of pairs that send different numbers of bytes, per byte of the largest pair."""
    return group.loads((group.route(src, dst), nbytes / largest) for (src, dst), nbytes in pairs.items())


def next_loads(group: Members) -> Loads:
    """Return bytes over each link per byte that every rank sends to the next."""
    size = group.size

    def make() -> Loads:
        return group.loads_of(group.ways(range(size), [(member + 1) % size for member in range(size)]), 1.0)

    result: Loads = group.cached("next loads", make)
    return result


def pair_loads(group: Members) -> Loads:
    """Return bytes over each link per byte from the first of two members to the second."""
    result: Loads = group.cached("pair loads", lambda: group.loads_of_one(group.route(0, 1)))
    return result


def longest_latency_s(group: Members) -> float:
    """Return the links' latency between the farthest two members (of a sample, in a large group)."""

    def make() -> float:
        size = group.size
        steps = {step for step in (1, 2, 3, size // 3, size // 2, size - 1) if 0 < step < size}
        members = range(0, size, max(1, size // 64))
        return max(
            (group.latency_s(group.route(a, (a + step) % size)) for a in members for step in steps),
            default=0.0,
        )

    result: float = group.cached("longest latency", make)
    return result


def direct_phase(group: Members, loads: Loads, pair_bytes: float, cost: TransferCost, hops: float = 1.0) -> PlanPhase:
    """Return a phase in which all pairs transfer at once.

    *hops* is the number of times that the start-up cost of a message is paid in sequence.
    """
    many = len(group.domains) > 1
    latency_s = cost.hop_s(longest_latency_s(group), many)
    latency_s += (hops - 1.0) * (cost.inter_hop_s if many else cost.intra_hop_s)
    streams = 1.0 / (cost.net_wire if many else cost.wire)
    return PlanPhase(group.with_cost(loads, cost), pair_bytes, cost.edge_bytes_per_s, latency_s, streams)


def direct_messages(group: Members, pairs: Pairs, cost: TransferCost) -> list[PlannedMessage]:
    """Return one message for each pair of ranks; all start at the same time."""
    messages: list[PlannedMessage] = []
    for (src, dst), nbytes in pairs.items():
        links = group.route(src, dst)
        same = group.same_domain(src, dst)
        wire = cost.wire if same else cost.net_wire
        latency_s = cost.hop_s(group.latency_s(links), not same)
        messages.append(PlannedMessage(links, nbytes * wire, latency_s, cost.edge_bytes_per_s * wire))
    return messages


def binomial_phases(group: Members, nbytes: float, root: int, cost: TransferCost) -> tuple[PlanPhase, ...]:
    """Return a broadcast of *nbytes* from *root*, round by round (a reduce is the same backwards)."""
    size = group.size
    phases: list[PlanPhase] = []
    span = 1
    while span < size:
        loads: Loads = group.cached(("binomial", root, span), lambda span=span: _round(group, root, span))
        phases.append(direct_phase(group, loads, nbytes, cost))
        span *= 2
    return tuple(phases)


def _round(group: Members, root: int, span: int) -> Loads:
    size = group.size
    pairs = [(member, member + span) for member in range(span) if member + span < size]
    return group.loads((group.route((root + a) % size, (root + b) % size), 1.0) for a, b in pairs)
