"""Plain alpha-beta: the links' own latency and bandwidth, no launch, no protocol. For closed forms and the
referee.

Asked for by `--nccl-version ideal`, or by `version = "ideal"` in a cluster file's [nccl] table.
"""

from __future__ import annotations

from distsim.collectives.algorithms.direct import (
    all_to_all_loads,
    direct_messages,
    direct_phase,
    rooted_loads,
    split_loads,
)
from distsim.collectives.algorithms.ring import Shape, hierarchical_phases, ring_messages, ring_phase
from distsim.collectives.algorithms.tree import one_way_phase, tree_messages, tree_phase
from distsim.collectives.members import Members
from distsim.collectives.plan import Plan, TransferCost
from distsim.errors import UsageError
from distsim.text.untrusted_input import brief

__all__ = ["compile_ideal"]

_RING = ("all_reduce", "all_gather", "reduce_scatter")


def compile_ideal(
    group: Members,
    op: str,
    nbytes: float,
    root: int,
    splits: tuple[tuple[int, ...], ...] | None,
    algo: str | None,
) -> Plan:
    """*op* (one of the canonical names) at the links' own speed."""
    size = group.size
    if algo is not None and algo not in ("ring", "tree", "hierarchical", "direct"):
        raise UsageError(f"expected an algorithm (ring, tree, hierarchical, direct), got {brief(algo)!r}")
    if op == "all_reduce" and algo == "hierarchical":
        return Plan("hierarchical", "ideal", 1, 0.0, hierarchical_phases(group, nbytes, TransferCost()))
    if op in _RING and algo != "tree":
        shape = Shape.of(op, size, nbytes)
        return Plan(
            "ring",
            "ideal",
            1,
            0.0,
            (ring_phase(group, shape, TransferCost()),),
            lambda: ring_messages(group, shape, TransferCost()),
        )
    if op in ("all_reduce", "broadcast", "reduce", "barrier"):
        cost = TransferCost()
        phase = tree_phase(group, nbytes, cost) if op == "all_reduce" else one_way_phase(group, nbytes, cost)
        messages = (lambda: tree_messages(group, nbytes, cost)) if op == "all_reduce" else None
        return Plan("tree", "ideal", 1, 0.0, (phase,), messages)
    pairs = {}
    if op in ("gather", "scatter"):
        to_root = op == "gather"
        share = nbytes / size
        pairs = {((m, root) if to_root else (root, m)): share for m in range(size) if m != root}
        phase = direct_phase(group, rooted_loads(group, root, to_root), share, TransferCost())
    elif splits is not None:
        pairs = {(s, d): float(b) for s, row in enumerate(splits) for d, b in enumerate(row) if b and s != d}
        largest = max(pairs.values(), default=0.0)
        phase = direct_phase(group, split_loads(group, pairs, largest), largest, TransferCost())
    else:
        share = nbytes / size
        phase = direct_phase(group, all_to_all_loads(group), share, TransferCost())
        everyone = range(size)
        return Plan(
            "direct",
            "ideal",
            1,
            0.0,
            (phase,),
            lambda: direct_messages(
                group, {(s, d): share for s in everyone for d in everyone if s != d}, TransferCost()
            ),
        )
    return Plan("direct", "ideal", 1, 0.0, (phase,), lambda: direct_messages(group, pairs, TransferCost()))
