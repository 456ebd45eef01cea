"""NVLink SHARP: the NVSwitch adds up what the GPUs hold and multicasts the result; between nodes, a tree
on top."""

from __future__ import annotations

import numpy as np

from distsim.collectives.algorithms.tree import tree_hops, tree_loads
from distsim.collectives.members import Members
from distsim.collectives.plan import Cost, Loads, Phase

__all__ = ["nvls_phase", "nvls_tree_phase"]


def _switch_loads(group: Members, op: str) -> Loads:
    """Each GPU owns one n-th of the buffer: the switch adds it up from all (one n-th comes in, the whole
    buffer goes out) and multicasts it to all (one n-th goes out, the whole buffer comes in).

    Measured, 8 and 72 GPUs reach the same bus bandwidth (835 GB/s on B200 and GB200), so all_reduce is
    reckoned by 2 (n - 1) / n, scaled to the 1 + 1/8 of eight GPUs.
    """

    def make() -> Loads:
        size = max(2, group.per_domain)
        both = 9.0 / 14.0 * 2.0 * (size - 1) / size
        out = {"all_reduce": both, "all_gather": 1.0 / size, "reduce_scatter": 1.0}.get(op, 1.0)
        back = {"all_reduce": both, "all_gather": 1.0, "reduce_scatter": 1.0 / size}.get(op, 1.0)
        paths: list[tuple[tuple[int, ...], float]] = []
        for domain in group.domains:
            for member, after in zip(domain, [*domain[1:], domain[0]], strict=True):
                links = group.route(member, after)
                if links:
                    paths += [((links[0],), out), ((links[-1],), back)]
        return group.loads(paths)

    found: Loads = group.cached(("nvls loads", op), make)
    return found


def nvls_phase(group: Members, op: str, nbytes: float, cost: Cost) -> Phase:
    """Reduction (and multicast) inside one NVSwitch."""
    loads = _switch_loads(group, op)
    latency_s = 2 * cost.hop_s(group.cluster.node.nvlink_latency_s, False)
    return Phase(Loads(loads.links, loads.weights * cost.wire), nbytes, cost.edge_bytes_per_s, latency_s, group.streams)


def nvls_tree_phase(group: Members, nbytes: float, cost: Cost) -> Phase:
    """NVLS inside nodes and the double tree between them, in one pipeline."""

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
    return Phase(group.with_cost(loads, cost), nbytes, cost.edge_bytes_per_s, latency_s, group.streams)
