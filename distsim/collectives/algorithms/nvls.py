"""NVLink SHARP: the NVSwitch adds up what the GPUs hold and multicasts the result; between nodes, a tree
on top."""

from __future__ import annotations

import math

import numpy as np

from distsim.collectives.algorithms.tree import tree_hops, tree_loads
from distsim.collectives.members import Members
from distsim.collectives.plan import Cost, Loads, Phase

__all__ = ["nvls_phase", "nvls_tree_phase"]

_RADIX = 32
"""Ports down of a switch of 64: the depth of the fabric's tree goes by it."""
_SWITCH_S = 0.5e-6
"""Adding up in a switch on its way up, or copying on its way down: estimate, a few times Quantum's 130 ns."""


def _switch_loads(group: Members, op: str) -> Loads:
    """Each GPU owns one n-th of the buffer: the switch adds it up from all (one n-th comes in, the whole
    buffer goes out) and multicasts it to all (one n-th goes out, the whole buffer comes in). So fewer GPUs get
    less: 1 + 1/n of the buffer goes over each link. Beyond eight the share does not fall further: measured, 8 and 72
    GPUs reach the same bus bandwidth (835 GB/s on B200 and GB200), so there it is reckoned by 2 (n - 1) / n.
    """

    def make() -> Loads:
        size = max(2, group.per_domain)
        both = 1.0 + 1.0 / size if size <= 8 else 9.0 / 14.0 * 2.0 * (size - 1) / size
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
    """Reduction (and multicast) inside one NVSwitch; between nodes the fabric's switches reduce (SHARP)."""
    many = len(group.domains) > 1
    inside = _switch_loads(group, op)
    loads: Loads = group.cached(("sharp loads", op), lambda: _fabric_loads(group, inside)) if many else inside
    latency_s = 2 * cost.hop_s(group.cluster.node.nvlink_latency_s, False)
    if many:
        latency_s += 2 * cost.hop_s(group.cluster.node.nic_latency_s, True)
        latency_s += 2 * math.log(len(group.domains), _RADIX) * _SWITCH_S
    return Phase(group.with_cost(loads, cost), nbytes, cost.edge_bytes_per_s, latency_s, group.streams_at(cost))


def _fabric_loads(group: Members, inside: Loads) -> Loads:
    """*inside* with what the fabric adds up: each GPU's NIC sends that GPU's part of the node's sum once and gets the
    result once, over the links to its neighbours in the fabric."""
    total = np.zeros(len(group.capacity))
    total[inside.links] += inside.weights
    gates = len(group.gates[0])
    for index in range(len(group.domains)):
        after = (index + 1) % len(group.domains)
        for number in range(gates):
            here, there = group.gates[index][number], group.gates[after][number]
            links = group.route(here.near[0], there.near[0], here.rail)
            total[[link for link in links if group.links.outside[link]]] += 1.0 / gates
    used = np.flatnonzero(total)
    return Loads(used, total[used])


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
    return Phase(group.with_cost(loads, cost), nbytes, cost.edge_bytes_per_s, latency_s, group.streams_at(cost))
