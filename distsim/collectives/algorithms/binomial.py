"""The binomial tree: in every round, each member that has the data sends it on, so their number doubles."""

from __future__ import annotations

from distsim.collectives.algorithms.direct import direct_phase
from distsim.collectives.members import Members
from distsim.collectives.plan import Cost, Loads, Phase

__all__ = ["binomial_phases"]


def binomial_phases(group: Members, nbytes: float, root: int, cost: Cost) -> tuple[Phase, ...]:
    """A broadcast of *nbytes* from *root*, round by round (a reduce is the same backwards)."""
    size = group.size
    phases: list[Phase] = []
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
