"""MPI's algorithms: Open MPI's tuned component with its default fixed decisions.

Source: open-mpi/ompi v5.0, ompi/mca/coll/tuned/coll_tuned_decision_fixed.c (thresholds simplified to the
ones that matter) and coll/base (ring, recursive doubling, Bruck, binomial).
"""

from __future__ import annotations

import math

from distsim.collectives.algorithms.binomial import binomial_phases
from distsim.collectives.algorithms.direct import (
    all_to_all_loads,
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
from distsim.collectives.plan import Cost, Phase, Plan

__all__ = ["compile_mpi"]

_LAUNCH_S = 5e-6
"""torch's MPI thread takes the call from a queue (ProcessGroupMPI.cpp): a hand-over between threads."""
_HOP_S = 1.5e-6
"""Software of one eager message (Open MPI ob1 over TCP or UCX, order of magnitude)."""
_SMALL_BYTES = 10_000
"""all_reduce: recursive doubling below, ring above (intermediate size 10,000 in the fixed decision)."""


def compile_mpi(group: Members, op: str, nbytes: float, root: int, splits: tuple[tuple[int, ...], ...] | None) -> Plan:
    """*op* as Open MPI does it by default."""
    size = group.size
    together = float(size - 1 if op in ("gather", "scatter", "all_to_all") else 1)
    pairs = {(s, d): float(b) for s, row in enumerate(splits or ()) for d, b in enumerate(row) if b and s != d}
    if pairs:
        together = shares(pairs)
    rate = each_of(group, together) if group.cluster.nccl.net == "tcp" else math.inf
    cost = Cost(edge_bytes_per_s=rate, intra_hop_s=_HOP_S, inter_hop_s=_HOP_S)
    if size == 1:
        return Plan("none", "mpi", 1, _LAUNCH_S)
    rounds = math.ceil(math.log2(size))
    far_s = longest_latency_s(group) + _HOP_S
    if op == "barrier":
        return Plan("recursive doubling", "mpi", 1, _LAUNCH_S + rounds * far_s)
    if op == "all_reduce" and nbytes < _SMALL_BYTES:
        return Plan("recursive doubling", "mpi", 1, _LAUNCH_S, _doubling(group, nbytes, far_s))
    if op in ("all_reduce", "all_gather", "reduce_scatter"):
        shape = Shape.of(op, size, nbytes)
        return Plan(
            "ring",
            "mpi",
            1,
            _LAUNCH_S,
            (ring_phase(group, shape, cost),),
            lambda: ring_messages(group, shape, cost),
        )
    if op in ("broadcast", "reduce"):
        return Plan("binomial", "mpi", 1, _LAUNCH_S, binomial_phases(group, nbytes, root, cost))
    if op in ("gather", "scatter"):
        loads = rooted_loads(group, root, op == "gather")
        return Plan("linear", "mpi", 1, _LAUNCH_S, (direct_phase(group, loads, nbytes, cost),))
    if op in ("send", "sendrecv"):
        loads = next_loads(group) if op == "sendrecv" else pair_loads(group)
        return Plan("send", "mpi", 1, _LAUNCH_S, (direct_phase(group, loads, nbytes, cost),))
    if splits is None:
        phase = direct_phase(group, all_to_all_loads(group), nbytes / size, cost, hops=size - 1)
    else:
        largest = max(pairs.values(), default=0.0)
        phase = direct_phase(group, split_loads(group, pairs, largest), largest, cost, hops=size - 1)
    return Plan("pairwise", "mpi", 1, _LAUNCH_S, (phase,))


def _doubling(group: Members, nbytes: float, far_s: float) -> tuple[Phase, ...]:
    size = group.size
    phases: list[Phase] = []
    span = 1
    while span < size:

        def make(span: int = span):  # type: ignore[no-untyped-def]
            return group.loads((group.route(m, m ^ span), 1.0) for m in range(size) if m ^ span < size)

        phases.append(Phase(group.cached(("doubling", span), make), nbytes, math.inf, far_s))
        span *= 2
    return tuple(phases)
