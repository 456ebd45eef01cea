"""Gloo's algorithms, as torch's ProcessGroupGloo calls them (bcube is never used by it).

Sources: facebookincubator/gloo: allreduce.cc (ring), allgather.cc (ring), broadcast.cc (binomial tree),
reduce.cc (ring reduce-scatter, then gather to the root), gather.cc and scatter.cc (straight to and from
the root), alltoall.cc (all pairs at once), barrier.cc (dissemination);
torch/csrc/distributed/c10d/ProcessGroupGloo.cpp.
"""

from __future__ import annotations

import math
from dataclasses import replace

from distsim.collectives.algorithms.binomial import binomial_phases
from distsim.collectives.algorithms.direct import (
    all_to_all_loads,
    direct_messages,
    direct_phase,
    longest_latency_s,
    next_loads,
    pair_loads,
    rooted_loads,
    split_loads,
)
from distsim.collectives.algorithms.ring import Shape, ring_messages, ring_phase
from distsim.collectives.libraries.sockets import each_of, shares
from distsim.collectives.members import Members
from distsim.collectives.plan import Cost, Plan

__all__ = ["compile_gloo", "progress_bytes"]

_LAUNCH_S = 60e-6
"""Hand-over to gloo's worker thread and back; on 2 shared cores, torch 2.13 (see `distsim calibrate --on
gloo`)."""
_HOP_S = 20e-6
"""What a message costs beyond the wire: epoll, system calls, the copy."""


def progress_bytes(op: str, size: int, nbytes: float) -> float:
    """What one transfer of *op* moves, over all its rounds: what a calibration's times per byte are for."""
    if op in ("all_reduce", "all_gather", "reduce_scatter"):
        return Shape.of(op, size, nbytes).edge_bytes
    if op == "all_to_all":
        return nbytes / size
    if op == "broadcast":
        return nbytes * math.ceil(math.log2(size))
    return nbytes


_MEASURED_AS = {
    "reduce_scatter": "all_reduce",
    "gather": "all_to_all",
    "scatter": "all_to_all",
    "send": "sendrecv",
}
"""Operations that `distsim calibrate --on gloo` does not measure, and the one they are taken to cost like."""


def _cost(group: Members, op: str, nbytes: float) -> tuple[float, Cost]:
    """Start-up and cost: the calibration's where the cluster file has one, general figures otherwise."""
    given = group.cluster.calibration
    key = f"gloo_{_MEASURED_AS.get(op, op)}"
    if group.size == 1 or f"{key}_launch_s" not in given:
        peers = group.size - 1 if op in ("gather", "scatter", "all_to_all") else 1
        return _LAUNCH_S, Cost(edge_bytes_per_s=each_of(group, peers), intra_hop_s=_HOP_S, inter_hop_s=_HOP_S)
    moved = progress_bytes(op, group.size, nbytes)
    beyond = max(moved - given[f"{key}_knee_bytes"], 0.0)
    busy_s = moved * given[f"{key}_s_per_byte"] + beyond * given[f"{key}_more_s_per_byte"]
    return given[f"{key}_launch_s"], Cost(edge_bytes_per_s=moved / busy_s if busy_s > 0.0 else math.inf)


def compile_gloo(group: Members, op: str, nbytes: float, root: int, splits: tuple[tuple[int, ...], ...] | None) -> Plan:
    """*op* as gloo does it. *nbytes* as in `Transfer`."""
    launch_s, cost = _cost(group, op, nbytes)
    hop_s = cost.inter_hop_s
    size = group.size
    if size == 1:
        return Plan("none", "gloo", 1, launch_s)
    if op in ("all_reduce", "all_gather", "reduce_scatter"):
        shape = Shape.of(op, size, nbytes)
        phase = ring_phase(group, shape, cost)
        return Plan("ring", "gloo", 1, launch_s, (phase,), lambda: ring_messages(group, shape, cost))
    if op == "barrier":
        rounds = math.ceil(math.log2(size))
        return Plan("dissemination", "gloo", 1, launch_s + rounds * (longest_latency_s(group) + hop_s))
    if op == "broadcast":
        return Plan("binomial", "gloo", 1, launch_s, binomial_phases(group, nbytes, root, cost))
    if op == "reduce":
        scatter = ring_phase(group, Shape.of("reduce_scatter", size, nbytes), cost)
        each = replace(cost, edge_bytes_per_s=cost.edge_bytes_per_s / (size - 1))
        collect = direct_phase(group, rooted_loads(group, root, True), nbytes / size, each)
        return Plan("ring + gather", "gloo", 1, launch_s, (scatter, collect))
    if op in ("gather", "scatter"):
        to_root = op == "gather"
        phase = direct_phase(group, rooted_loads(group, root, to_root), nbytes, cost)
        pairs = {((m, root) if to_root else (root, m)): float(nbytes) for m in range(size) if m != root}
        return Plan("direct", "gloo", 1, launch_s, (phase,), lambda: direct_messages(group, pairs, cost))
    if op in ("send", "sendrecv"):
        loads = next_loads(group) if op == "sendrecv" else pair_loads(group)
        return Plan("send", "gloo", 1, launch_s, (direct_phase(group, loads, nbytes, cost),))
    return _all_to_all(group, nbytes, splits, cost, launch_s)


def _all_to_all(
    group: Members, nbytes: float, splits: tuple[tuple[int, ...], ...] | None, cost: Cost, launch_s: float
) -> Plan:
    size = group.size
    if splits is None:
        share = nbytes / size
        phase = direct_phase(group, all_to_all_loads(group), share, cost)
        pairs = {(s, d): share for s in range(size) for d in range(size) if s != d} if size <= 128 else {}
    else:
        pairs = {(s, d): float(b) for s, row in enumerate(splits) for d, b in enumerate(row) if b and s != d}
        largest = max(pairs.values(), default=0.0)
        if "gloo_all_to_all_launch_s" not in group.cluster.calibration:
            cost = replace(cost, edge_bytes_per_s=each_of(group, shares(pairs)))
        phase = direct_phase(group, split_loads(group, pairs, largest), largest, cost)
    return Plan(
        "direct",
        "gloo",
        1,
        launch_s,
        (phase,),
        (lambda: direct_messages(group, pairs, cost)) if pairs else None,
    )
