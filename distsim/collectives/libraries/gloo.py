"""Gloo and MPI: libraries whose ranks copy bytes through sockets on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from distsim.collectives.algorithms.direct import (
    all_to_all_loads,
    binomial_phases,
    direct_messages,
    direct_phase,
    even_pairs,
    longest_latency_s,
    next_loads,
    pair_loads,
    rooted_loads,
    rooted_pairs,
    split_loads,
    split_pairs,
)
from distsim.collectives.algorithms.ring import Shape, ring_messages, ring_phase
from distsim.collectives.members import Members
from distsim.collectives.plan import Plan, PlanPhase, TransferCost


def each_of(group: Members, peers: float) -> float:
    """Return bytes per second with each of *peers* at once: together no more than over loopback, where nothing but
    the copies takes time (gloo/transport/tcp/loop.cc: one loop for all pairs; Open MPI's btl/tcp: one progress
    engine).
    """
    return group.cluster.cpu.loopback_bytes_per_s / max(1.0, peers)


def shares(pairs: Mapping[tuple[int, int], float]) -> float:
    """Return the bytes that the busiest rank sends or receives, in units of the largest of the uneven *pairs*."""
    sent: dict[tuple[int, bool], float] = {}
    for (src, dst), nbytes in pairs.items():
        sent[src, True] = sent.get((src, True), 0.0) + nbytes
        sent[dst, False] = sent.get((dst, False), 0.0) + nbytes
    return max(sent.values(), default=0.0) / max(pairs.values(), default=1.0)


# -- Gloo's algorithms, as torch's ProcessGroupGloo calls them (bcube is never used by it).
#
# Sources: facebookincubator/gloo: allreduce.cc (ring), allgather.cc (ring), broadcast.cc (binomial tree),
# reduce.cc (ring reduce-scatter, then gather to the root), gather.cc and scatter.cc (straight to and from
# the root), alltoall.cc (all pairs at once), barrier.cc (dissemination);
# torch/csrc/distributed/c10d/ProcessGroupGloo.cpp.

_GLOO_LAUNCH_S = 60e-6
"""Hand-over to gloo's worker thread and back; on 2 shared cores, torch 2.13 (see `distsim calibrate --on
gloo`)."""
_GLOO_HOP_S = 20e-6
"""Seconds of a message beyond the wire: epoll, system calls, the copy."""


def progress_bytes(op: str, size: int, nbytes: float) -> float:
    """Return the bytes that one transfer of *op* moves over all rounds, to which a calibrated time per byte applies."""
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


def _cost(group: Members, op: str, nbytes: float) -> tuple[float, TransferCost]:
    """Return the start-up time and the cost: from the cluster file's calibration if it has one, else general
    figures.
    """
    given = group.cluster.calibration
    key = f"gloo_{_MEASURED_AS.get(op, op)}"
    if group.size == 1 or f"{key}_launch_s" not in given:
        peers = group.size - 1 if op in ("gather", "scatter", "all_to_all") else 1
        return _GLOO_LAUNCH_S, TransferCost(
            edge_bytes_per_s=each_of(group, peers), intra_hop_s=_GLOO_HOP_S, inter_hop_s=_GLOO_HOP_S
        )
    moved = progress_bytes(op, group.size, nbytes)
    beyond = max(moved - given[f"{key}_knee_bytes"], 0.0)
    busy_s = moved * given[f"{key}_s_per_byte"] + beyond * given[f"{key}_more_s_per_byte"]
    return given[f"{key}_launch_s"], TransferCost(edge_bytes_per_s=moved / busy_s if busy_s > 0.0 else math.inf)


def compile_gloo(group: Members, op: str, nbytes: float, root: int, splits: tuple[tuple[int, ...], ...] | None) -> Plan:
    """Compile *op* the way gloo carries it out. *nbytes* is defined as in `Transfer`."""
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
        pairs = rooted_pairs(size, root, to_root, float(nbytes))
        return Plan("direct", "gloo", 1, launch_s, (phase,), lambda: direct_messages(group, pairs, cost))
    if op in ("send", "sendrecv"):
        loads = next_loads(group) if op == "sendrecv" else pair_loads(group)
        return Plan("send", "gloo", 1, launch_s, (direct_phase(group, loads, nbytes, cost),))
    return _all_to_all(group, nbytes, splits, cost, launch_s)


def _all_to_all(
    group: Members, nbytes: float, splits: tuple[tuple[int, ...], ...] | None, cost: TransferCost, launch_s: float
) -> Plan:
    size = group.size
    if splits is None:
        share = nbytes / size
        phase = direct_phase(group, all_to_all_loads(group), share, cost)
        pairs = even_pairs(size, share) if size <= 128 else {}
    else:
        pairs = split_pairs(splits)
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


# -- MPI's algorithms: Open MPI's tuned component with its default fixed decisions.
#
# Source: open-mpi/ompi v5.0, ompi/mca/coll/tuned/coll_tuned_decision_fixed.c (thresholds simplified to the
# ones that matter) and coll/base (ring, recursive doubling, Bruck, binomial).

_MPI_LAUNCH_S = 5e-6
"""Time for handing a call over to torch's MPI thread, which takes it from a queue (ProcessGroupMPI.cpp)."""
_MPI_HOP_S = 1.5e-6
"""Software of one eager message (Open MPI ob1 over TCP or UCX, order of magnitude)."""
_SMALL_BYTES = 10_000
"""all_reduce: recursive doubling below, ring above (intermediate size 10,000 in the fixed decision)."""


def compile_mpi(group: Members, op: str, nbytes: float, root: int, splits: tuple[tuple[int, ...], ...] | None) -> Plan:
    """Compile *op* with Open MPI's default algorithm."""
    size = group.size
    together = float(size - 1 if op in ("gather", "scatter", "all_to_all") else 1)
    pairs = split_pairs(splits or ())
    if pairs:
        together = shares(pairs)
    rate = each_of(group, together) if group.cluster.nccl.net == "tcp" else math.inf
    cost = TransferCost(edge_bytes_per_s=rate, intra_hop_s=_MPI_HOP_S, inter_hop_s=_MPI_HOP_S)
    if size == 1:
        return Plan("none", "mpi", 1, _MPI_LAUNCH_S)
    rounds = math.ceil(math.log2(size))
    far_s = longest_latency_s(group) + _MPI_HOP_S
    if op == "barrier":
        return Plan("recursive doubling", "mpi", 1, _MPI_LAUNCH_S + rounds * far_s)
    if op == "all_reduce" and nbytes < _SMALL_BYTES:
        return Plan("recursive doubling", "mpi", 1, _MPI_LAUNCH_S, _doubling(group, nbytes, far_s))
    if op in ("all_reduce", "all_gather", "reduce_scatter"):
        shape = Shape.of(op, size, nbytes)
        return Plan(
            "ring",
            "mpi",
            1,
            _MPI_LAUNCH_S,
            (ring_phase(group, shape, cost),),
            lambda: ring_messages(group, shape, cost),
        )
    if op in ("broadcast", "reduce"):
        return Plan("binomial", "mpi", 1, _MPI_LAUNCH_S, binomial_phases(group, nbytes, root, cost))
    if op in ("gather", "scatter"):
        loads = rooted_loads(group, root, op == "gather")
        return Plan("linear", "mpi", 1, _MPI_LAUNCH_S, (direct_phase(group, loads, nbytes, cost),))
    if op in ("send", "sendrecv"):
        loads = next_loads(group) if op == "sendrecv" else pair_loads(group)
        return Plan("send", "mpi", 1, _MPI_LAUNCH_S, (direct_phase(group, loads, nbytes, cost),))
    if splits is None:
        phase = direct_phase(group, all_to_all_loads(group), nbytes / size, cost, hops=size - 1)
    else:
        largest = max(pairs.values(), default=0.0)
        phase = direct_phase(group, split_loads(group, pairs, largest), largest, cost, hops=size - 1)
    return Plan("pairwise", "mpi", 1, _MPI_LAUNCH_S, (phase,))


def _doubling(group: Members, nbytes: float, far_s: float) -> tuple[PlanPhase, ...]:
    size = group.size
    phases: list[PlanPhase] = []
    span = 1
    while span < size:

        def make(span: int = span):  # type: ignore[no-untyped-def]
            return group.loads((group.route(m, m ^ span), 1.0) for m in range(size) if m ^ span < size)

        phases.append(PlanPhase(group.cached(("doubling", span), make), nbytes, math.inf, far_s))
        span *= 2
    return tuple(phases)
