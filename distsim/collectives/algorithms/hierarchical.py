"""An all_reduce in three steps: reduce_scatter inside every node, all_reduce across nodes for each share,
all_gather inside. What frameworks do by hand (2D all_reduce, HSDP); asked for by `--algo hierarchical` in
plain alpha-beta."""

from __future__ import annotations

from distsim.collectives.algorithms.ring import Shape
from distsim.collectives.members import Members
from distsim.collectives.plan import Cost, Loads, Phase

__all__ = ["hierarchical_phases"]


def hierarchical_phases(group: Members, nbytes: float, cost: Cost) -> tuple[Phase, ...]:
    """The three phases, each with all its rings side by side in lockstep."""
    inner = [domain for domain in group.domains if len(domain) > 1]
    width = min(len(domain) for domain in group.domains)
    outer = [[domain[place] for domain in group.domains] for place in range(width)]
    phases: list[Phase] = []
    if inner:
        phases.append(_rings(group, inner, "reduce_scatter", nbytes, cost))
    if len(group.domains) > 1:
        phases.append(_rings(group, outer, "all_reduce", nbytes / width, cost))
    if inner:
        phases.append(_rings(group, inner, "all_gather", nbytes, cost))
    return tuple(phases)


def _rings(group: Members, rings: list[list[int]], op: str, nbytes: float, cost: Cost) -> Phase:
    size = max(len(ring) for ring in rings)
    shape = Shape.of(op, size, nbytes)
    hops = [
        group.route(member, after) for ring in rings for member, after in zip(ring, [*ring[1:], ring[0]], strict=True)
    ]

    def make() -> Loads:
        return group.loads((links, 1.0) for links in hops)

    loads = group.with_cost(group.cached(("hierarchical", op, size), make), cost)
    inter = not group.same_domain(rings[0][0], rings[0][1])
    latency_s = shape.steps * cost.hop_s(max(group.latency_s(links) for links in hops), inter)
    return Phase(loads, shape.edge_bytes, cost.edge_bytes_per_s, latency_s)
