"""What one of NCCL's choices costs: software beyond the links, from the fitted constants of
`calibration/nccl.toml`.

A collective's time is the larger of the launcher's floor and of: a launch, a cost per hop inside and
between nodes (protocol, fabric), the fill of the pipeline, and the bytes through the slowest of links and
channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from distsim.calibration.constants import Constants
from distsim.cluster import Cluster
from distsim.collectives.algorithms.nvls import nvls_phase, nvls_tree_phase
from distsim.collectives.algorithms.ring import Shape, ring_hops, ring_loads, ring_phase
from distsim.collectives.algorithms.tree import tree_hops, tree_phase
from distsim.collectives.libraries.nccl_tuning import Machine
from distsim.collectives.members import Members
from distsim.collectives.plan import Cost, Loads, Phase

__all__ = ["NcclTiming", "Timed"]

_GENERATIONS = ("ampere", "ampere", "hopper", "blackwell")


@dataclass(frozen=True, slots=True)
class Timed:
    """Software time before the first byte, the bytes' phase, and the cost its messages pay."""

    software_s: float
    phase: Phase
    cost: Cost


class NcclTiming:
    """The constants of one cluster's generation and fabric."""

    def __init__(self, cluster: Cluster, constants: Constants, launcher: str) -> None:
        self.constants = constants
        self.cluster = cluster
        self.launcher = launcher
        self.net = cluster.nccl.net if cluster.nccl.net != "none" else "ib"

    def _of(self, table: str, key: str) -> float:
        return self.constants.get(table, key)

    def generation(self, machine: Machine) -> str:
        """Whose constants: ampere, hopper, blackwell."""
        return _GENERATIONS[machine.generation]

    def floor_s(self, group: Members) -> float:
        """What launching costs the host, whatever the kernels do meanwhile."""
        if self.launcher == "shared":
            return self._of("launch", "shared_process_per_gpu") * group.per_node * 1e-6
        return self._of("launch", "process") * 1e-6

    def p2p_floor_s(self, group: Members) -> float:
        """The same for grouped sends and receives."""
        if self.launcher == "shared":
            return self._of("p2p", "shared_process_per_gpu") * group.per_node * 1e-6
        return self._of("launch", "process") * 1e-6

    def hops_s(self, machine: Machine, proto: str) -> tuple[float, float]:
        """Software of a hop inside a node and of one between nodes."""
        inside = self.generation(machine) if machine.intra == "nvlink" else "pcie"
        return self._of(inside, f"hop_{proto}") * 1e-6, self._of(self.net, f"hop_{proto}") * 1e-6

    def cost(self, machine: Machine, proto: str, ll_channels: float, local: float) -> Cost:
        """What *proto* does to the bytes. LL uses *ll_channels* of its channels; *local* is how many bytes
        are read and reduced, or copied, beside each one that moves, which the transfer hides only in part."""
        name = self.generation(machine)
        net = 1.0 / self._of(self.net, "efficiency") if machine.num_nodes > 1 else 1.0
        channels = 2 * machine.channels if machine.num_nodes > 1 else machine.channels
        if proto == "LL":
            rate = self._of(name if machine.intra == "nvlink" else "pcie", "channel_LL") * 1e9
            used = min(max(ll_channels, 1.0), channels)
            limit = self._of(self.net, "rate_LL") * 1e9 if machine.num_nodes > 1 else math.inf
            return Cost(2.0, 2.0 * net, min(rate * used, limit), channels * 32768.0, intra_links=0.0)
        efficiency = self._of(name, f"efficiency_{proto}")
        piece = 524288.0 if proto == "Simple" else 131072.0
        wire = 1.0 / efficiency
        if machine.intra == "nvlink":
            wire += self._of(name, "local") * local
        else:
            wire = 1.0 / self._of("pcie", "efficiency")
        if proto == "LL128":
            net *= 128 / 120
        return Cost(wire, net, piece_bytes=channels * piece, intra_links=0.0)

    def ring(self, group: Members, machine: Machine, op: str, nbytes: float, proto: str) -> Timed:
        """A ring."""
        shape = Shape.of(op, group.size, nbytes)
        local = (1.64 if op == "all_reduce" else 1.0) * nbytes / max(shape.edge_bytes, 1.0)
        cost = self.cost(machine, proto, nbytes / group.size / 512.0, local)
        inside, between = ring_hops(group, shape)
        intra_s, inter_s = self.hops_s(machine, proto)
        software_s = self._of("launch", proto) * 1e-6 + inside * intra_s + between * inter_s
        chunk = self._of("launch", "chunk_MiB") * 2**20 * machine.channels * shape.steps
        slowest = group.slowest_s_per_byte(group.with_cost(ring_loads(group), cost))
        software_s += self._of("launch", "fill") * min(shape.edge_bytes, chunk) * slowest
        return Timed(software_s, ring_phase(group, shape, cost), cost)

    def tree(self, group: Members, machine: Machine, nbytes: float, proto: str) -> Timed:
        """The double tree of an all_reduce."""
        cost = self.cost(machine, proto, nbytes / 4096.0, 1.0)
        inside, between = tree_hops(group)
        intra_s, inter_s = self.hops_s(machine, proto)
        if proto == "LL":
            rate = cost.edge_bytes_per_s * self._of("launch", "tree_LL")
            cost = replace(cost, edge_bytes_per_s=rate)
            inter_s *= 1.0 + self._of("launch", "growth_LL") * min(nbytes / 65536.0, 1.0)
        elif proto == "LL128":
            share = self._of(self.generation(machine), "tree_LL128")
            cost = replace(cost, wire=cost.wire / share, net_wire=cost.net_wire / share)
        software_s = self._of("launch", proto) * 1e-6 + 2 * (inside * intra_s + between * inter_s)
        return Timed(software_s, tree_phase(group, nbytes, cost), cost)

    def pat(self, group: Members, machine: Machine, op: str, nbytes: float) -> Timed:
        """PAT, a tree for each rank's part: log2(n) rounds, then bandwidth at three quarters of a ring's
        (NCCL's own figures, tuning.cc: latency of a round 1 / 3.5 of a ring's, 2.8 us a rank, 0.75)."""
        ring = self.ring(group, machine, op, nbytes, "Simple")
        _, inter_s = self.hops_s(machine, "Simple")
        software_s = 8e-6 + math.log2(machine.num_nodes) * inter_s / 3.5 + 2.8e-6 * machine.num_ranks
        loads = Loads(ring.phase.loads.links, ring.phase.loads.weights / 0.75)
        far_s = math.log2(machine.num_nodes) * self.cluster.node.nic_latency_s
        moved = Shape.of(op, group.size, nbytes).edge_bytes
        return Timed(software_s, Phase(loads, moved, latency_s=far_s, streams=group.streams), ring.cost)

    def nvls(self, group: Members, machine: Machine, op: str, nbytes: float, tree: bool) -> Timed:
        """NVLS on one NVSwitch, or NVLSTree."""
        name = self.generation(machine)
        net = 1.0 / self._of(self.net, "efficiency") if tree else 1.0
        cost = Cost(1.0 / self._of(name, "nvls"), net, intra_links=0.0)
        software_s = self._of(name, "nvls_base") * 1e-6
        if tree:
            _, between = tree_hops(group)
            software_s += self._of(name, "nvls_tree_base") * 1e-6
            software_s += 2 * between * self._of(self.net, "hop_Simple") * 1e-6
            phase = nvls_tree_phase(group, nbytes, cost)
        else:
            phase = nvls_phase(group, op, nbytes, cost)
        slowest = group.slowest_s_per_byte(phase.loads)
        # The more GPUs, the smaller each one's part of a chunk: 72 fill their pipeline nine times as long as
        # 8.
        fill = self._of("launch", "fill") * max(1.0, group.per_domain / 8.0)
        software_s += fill * min(nbytes, 2**28) * slowest
        return Timed(software_s, phase, cost)

    def direct(self, machine: Machine, num_peers: int) -> tuple[float, Cost]:
        """Software and cost of grouped sends and receives with *num_peers* peers a rank."""
        name = self.generation(machine)
        software_s = (self._of("p2p", "base") + self._of("p2p", "per_peer") * num_peers) * 1e-6
        if machine.num_nodes > 1:
            software_s += self._of(self.net, "hop_p2p") * 1e-6
        net = 1.0 / self._of(self.net, "p2p")
        return software_s, Cost(1.0 / self._of(name, "p2p"), net, intra_links=0.0)
