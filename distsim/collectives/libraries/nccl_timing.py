"""Cost of NCCL's choices beyond the links, from the fitted constants of `collectives/fitted/nccl.toml`.

The time of a collective is the larger of a minimum for the launch and of the sum of: the launch, the hops inside and
between nodes (by protocol and fabric), the fill of the pipeline, and the bytes over the slowest link or channel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from distsim.cluster import Cluster
from distsim.cluster.graph.link import NcclFacts
from distsim.collectives.algorithms.direct import all_to_all_loads, direct_phase
from distsim.collectives.algorithms.ring import Shape, ring_hops, ring_loads, ring_phase
from distsim.collectives.algorithms.tree import nvls_phase, nvls_tree_phase, tree_hops, tree_phase
from distsim.collectives.constants import Constants
from distsim.collectives.libraries.nccl_channels import (
    host_copy_bytes,
    nvls_tree_loop_bytes,
    tree_parts,
    tree_piece_bytes,
)
from distsim.collectives.libraries.nccl_tuning import Machine, channel_gbps, nvls_channel_gbps, steps_of
from distsim.collectives.members import Members
from distsim.collectives.plan import INFINITY, Loads, PlanPhase, TransferCost


def fabric_table(nccl: NcclFacts, version: tuple[int, int], constants: Constants) -> str:
    """Return the name of the table of constants for a fabric and its software.

    Slingshot's NICs match messages in hardware unless FI_CXI_RX_MATCH_MODE says otherwise; a Grace host is quicker
    with both. aws-ofi-nccl sends libfabric messages on p4d, and uses RDMA writes from p5 on (src/platform-aws.cpp,
    default_protocol). Sockets with NCCL 2.18 are as slow as with 2.21 if NCCL_CROSS_NIC is set (setup 2 of
    argonne-lcf/alcf-nccl-tests). Google's RoCE in virtual machines has its own plugin.
    """
    net = nccl.net
    if net == "none":
        return "ib"
    if net == "slingshot" and nccl.cpu_vendor == "arm":
        return "slingshot-grace"
    if net == "slingshot" and nccl.settings.get("FI_CXI_RX_MATCH_MODE") == "software":
        return "slingshot-software"
    if net == "efa" and nccl.compute_capability < 90:
        return "efa-sendrecv"
    if net == "tcp" and version < (2, 19) and "NCCL_CROSS_NIC" not in nccl.settings:
        return "tcp-before-2_19"
    if net == "roce" and nccl.plugin.startswith("gib"):
        return "roce-gib"
    return net if constants.has_table(net) else "net"


_BY_THE_HOST = ("tcp", "tcp-before-2_19", "tcpx")
"""Fabrics on which the host's sockets carry one message after the other, whichever NIC it uses."""

_NEVER = 1e15
"""Value of eager_bytes if the measurements show no switch between protocols of the network."""
_GENERATIONS = ("ampere", "ampere", "hopper", "blackwell")


@dataclass(frozen=True, slots=True)
class Timed:
    """Cost of a transfer: software time before the first byte, the phase that moves bytes, costs of messages."""

    software_s: float
    phase: PlanPhase
    cost: TransferCost


class NcclTiming:
    """The constants of one cluster's generation and fabric."""

    def __init__(self, cluster: Cluster, constants: Constants, launcher: str, version: tuple[int, int]) -> None:
        self.constants = constants
        self.cluster = cluster
        self.launcher = launcher
        self.net = fabric_table(cluster.nccl, version, constants)
        copied = host_copy_bytes(cluster.nccl.settings)
        self.eager_bytes = constants.get(self.net, "eager_bytes")
        if copied is not None and self.eager_bytes < _NEVER:
            self.eager_bytes = float(copied)

    def _of(self, table: str, key: str) -> float:
        return self.constants.get(table, key)

    def matching(self, machine: Machine) -> str:
        """Return the constants' table for traffic in which each rank has many messages in flight, as in rings.

        A Slingshot NIC matches messages in hardware only up to a number of ranks; above it, the host does.
        """
        if self.net == "slingshot" and machine.num_ranks > self._of(self.net, "matched_ranks"):
            return "slingshot-software"
        return self.net

    def generation(self, machine: Machine) -> str:
        """Return the GPU generation whose constants apply: ampere, hopper or blackwell."""
        return _GENERATIONS[machine.generation]

    def floor_s(self, group: Members) -> float:
        """Return the host's seconds for launching the kernel, which are a lower bound of the collective's time."""
        if self.launcher == "shared":
            return self._of("launch", "shared_process_per_gpu") * group.per_node * 1e-6
        return self._of("launch", f"process_{self.cluster.nccl.cpu_vendor}") * 1e-6

    def p2p_floor_s(self, group: Members) -> float:
        """Return the minimum seconds of grouped sends and receives; RCCL's all-to-all counts as one collective."""
        if self.launcher == "shared" and self.cluster.nccl.library != "rccl":
            return self._of("p2p", "shared_process_per_gpu") * group.per_node * 1e-6
        return self.floor_s(group)

    def hop_us(self, net: str) -> float:
        """Return the microseconds of a tree's hop in LL, from the latency that the plugin reports if it does."""
        return self._of(net, "told_us") * self._of(net, "hop")

    def hops_s(self, machine: Machine, algo: str, proto: str) -> tuple[float, float]:
        """Return the software latency of a hop inside a node and of a hop between nodes, in a ring or a tree."""
        inside = self.generation(machine) if machine.intra == "nvlink" else "pcie"
        net = self.matching(machine) if algo == "ring" else self.net
        hop_us = self.hop_us(net)
        if algo == "ring":
            hop_us *= self._of(net, "ring_LL128" if proto == "LL128" else "ring_LL")
        elif proto == "LL128":
            hop_us *= self._of(net, "tree_LL128")
        if proto == "Simple":
            # A receiver waits for a flag behind the data: the same on a slow network as on a quick one.
            hop_us += self._of(net, f"{algo}_more")
        return self._of(inside, f"hop_{proto}") * 1e-6, hop_us * 1e-6

    def net_wire(self, machine: Machine, ring: bool = False) -> float:
        """Return bytes on a NIC's wire for each of payload: 1 / efficiency, which falls as nodes double."""
        if machine.num_nodes <= 1:
            return 1.0
        return max(self.lost(machine, ring) / self._of(self.net, "efficiency"), self.root_wire())

    def root_wire(self) -> float:
        """Return the wire factor if NICs access GPU memory through the processor's root ports.

        Root ports carry less between two devices than between a device and memory.
        """
        node = self.cluster.node
        if not (node.nics_beyond_root and node.gpu_direct_rdma):
            return 0.0
        return node.nic_bytes_per_s / (node.pcie_bytes_per_s * self._of("pcie", "root"))

    def lost(self, machine: Machine, ring: bool = False) -> float:
        """Return the factor by which transfers over more than two nodes are slower; it grows with each doubling, of
        trees up to 64 nodes. Of rings, where each node has two neighbors, those of few nodes lose nothing."""
        doublings = min(math.log2(machine.num_nodes / 2), 5.0)
        if ring:
            doublings = min(max(math.log2(machine.num_nodes / self._of(self.net, "ring_nodes")), 0.0), 5.0)
        return 1.0 + self._of(self.net, "ring_loss" if ring else "loss") * doublings

    def messages_s(self, machine: Machine, nbytes: float, proto: str) -> float:
        """Return the additional seconds of a ring's step between nodes because it has more than one message.

        There is one message per channel in use, and two if a channel's piece is cut into slices. Source: NCCL v2.21.5,
        enqueue.cc getChannnelThreadInfo, and device/prims_simple.h (a slice is 32 KiB or half a piece).
        """
        threshold = {"LL": 8 * machine.num_ranks * 512, "LL128": 8 * 640, "Simple": 64 * 512}[proto]
        used = min(machine.channels, max(1, int(nbytes / threshold)))
        slices = 2 if proto == "Simple" and nbytes / machine.num_ranks / used > 32768 else 1
        net = self.matching(machine)
        each = self._of(net, f"message_{proto}")
        if proto == "LL" and machine.num_nodes == 2:  # a piece leaves a node once: a NIC takes the next ones beside it
            each *= self._of(net, "message_pair")
        beside = 1 if self.net in _BY_THE_HOST else machine.nics
        return each * (used * slices - 1) / beside * 1e-6

    def step_s(self, machine: Machine, nbytes: float, proto: str, hop_s: float) -> float:
        """Return the time of a ring's step between nodes.

        With more ranks NCCL opens fewer channels, and so sends fewer messages. Even so, a whole ring is never taken
        to be quicker than the ring on fewer nodes.
        """

        def step(at: Machine) -> float:
            more_s = self.messages_s(at, nbytes, proto)
            if proto == "LL":
                more_s += self.rendezvous_s(at, nbytes, 8 * at.num_ranks * 512, at.num_ranks)
            return hop_s + more_s

        nodes, per_node = machine.num_nodes, machine.num_ranks / machine.num_nodes
        if nodes <= 2 or self._of(self.matching(machine), f"message_{proto}") * 1e-6 < hop_s:
            return step(machine)
        counts = [*range(2, min(nodes, 33)), *(nodes * i // 32 for i in range(1, 32)), nodes]
        slowest: float = max(
            step(replace(machine, num_nodes=count, num_ranks=int(per_node * count)))
            * (count - 1 / per_node)
            / (nodes - 1 / per_node)
            for count in counts
            if count >= 2
        )
        return slowest

    def rendezvous_s(self, machine: Machine, nbytes: float, per_channel: float, parts: int) -> float:
        """Return the seconds that an LL message between nodes costs beyond a hop if the provider does not copy it
        itself.

        That cost is a call of CUDA. A channel is added for every *per_channel* bytes; a message is a channel's share
        of one of *parts*, including its flags.
        """
        used = min(machine.channels, max(1, int(nbytes / per_channel)))
        if 2.0 * nbytes / parts / used <= self.eager_bytes:
            return 0.0
        return self._of(self.net, "rendezvous") * 1e-6

    def cost(self, machine: Machine, proto: str, ll_channels: float, local: float, ring: bool = False) -> TransferCost:
        """Return the transfer cost of a protocol.

        LL uses *ll_channels* of its channels. *local* is the number of bytes that are read and reduced, or copied, for
        each byte that moves; the transfer hides these only in part.
        """
        name = self.generation(machine)
        net, channels = self.net_wire(machine, ring), machine.channels
        if proto == "LL":
            rate = self._of(name if machine.intra == "nvlink" else "pcie", "channel_LL") * 1e9
            used = min(max(ll_channels, 1.0), channels)
            # LL's buffers are in the host's memory, which a GPU that has a NIC writes and reads over its own slot.
            limit = self._of(self.net, "rate_LL") * machine.nics * 1e9 if machine.num_nodes > 1 else math.inf
            return TransferCost(2.0, 2.0 * net, min(rate * used, limit), intra_links=0.0)
        efficiency = self._of(name, f"efficiency_{proto}")
        wire = 1.0 / efficiency
        if machine.intra == "nvlink":
            wire += self._of(name, "local") * local
        else:
            wire = 1.0 / self._of("pcie", "efficiency")
        if proto == "LL128":
            net *= 128 / 120
        limit = channels * channel_gbps(machine, proto) * 1e9 if machine.has_fewer_channels else math.inf
        return TransferCost(wire, net, limit, intra_links=0.0)

    def ring(self, group: Members, machine: Machine, op: str, nbytes: float, proto: str) -> Timed:
        """Return a ring."""
        shape = Shape.of(op, group.size, nbytes)
        local = (1.64 if op == "all_reduce" else 1.0) * nbytes / max(shape.edge_bytes, 1.0)
        cost = self.cost(machine, proto, nbytes / group.size / 4096.0, local, ring=True)
        inside, between = ring_hops(group, shape)
        intra_s, inter_s = self.hops_s(machine, "ring", proto)
        inter_s = self.step_s(machine, nbytes, proto, inter_s)
        software_s = self._of("launch", proto) * 1e-6 + inside * intra_s + between * inter_s
        chunk = self._of("launch", "chunk_MiB") * 2**20 * machine.channels * shape.steps
        slowest = group.slowest_s_per_byte(group.with_cost(ring_loads(group), cost))
        software_s += self._of("launch", "fill") * min(shape.edge_bytes, chunk) * slowest
        return Timed(software_s, ring_phase(group, shape, cost), cost)

    def tree(self, group: Members, machine: Machine, nbytes: float, proto: str) -> Timed:
        """Return the double tree of an all_reduce."""
        cost = self.cost(machine, proto, nbytes / 4096.0, 1.0)
        piece, parts = tree_piece_bytes(machine, nbytes, proto), tree_parts(machine, nbytes, proto)
        cost = replace(cost, piece_bytes=piece, cut_through=proto != "Simple", parts=parts)
        inside, between = tree_hops(group)
        intra_s, inter_s = self.hops_s(machine, "tree", proto)
        if machine.num_nodes > 1:
            cost = replace(cost, net_wire=cost.net_wire / self._of(self.net, "tree_share"))
        if proto == "LL":
            rate = cost.edge_bytes_per_s * self._of("launch", "tree_LL")
            cost = replace(cost, edge_bytes_per_s=rate)
            if machine.num_nodes > 1:
                cost = self.stored(machine, nbytes, cost)
            inter_s += self.rendezvous_s(machine, nbytes, 8 * 512, 1)
        elif proto == "LL128":
            share = self._of(self.generation(machine), "tree_LL128")
            cost = replace(cost, wire=cost.wire / share, net_wire=cost.net_wire / share)
        software_s = self._of("launch", proto) * 1e-6 + 2 * (inside * intra_s + between * inter_s)
        return Timed(software_s, tree_phase(group, nbytes, cost), cost)

    def stored(self, machine: Machine, nbytes: float, cost: TransferCost) -> TransferCost:
        """Return the *cost* of a tree with protocol LL between nodes.

        There a piece must be complete in the host's memory before the NIC sends it. It gets there at the rate of a
        channel, whatever the speed inside the node. A node inside a tree sends data on its way down twice, besides
        data on its way up (NCCL v2.21.5: src/device/all_reduce.h, runTreeSplit).
        """
        far = self._of(self.net, "channel_LL") * min(max(nbytes / 4096.0, 1.0), machine.channels) * 1e9
        near_s = 1.0 / cost.edge_bytes_per_s - 1.0 / far
        return replace(
            cost,
            edge_bytes_per_s=min(cost.edge_bytes_per_s, far / (2.0 if machine.num_nodes > 2 else 1.0)),
            near_bytes_per_s=1.0 / near_s if near_s > 0.0 else math.inf,
            far_bytes_per_s=far,
        )

    def all_pairs(self, group: Members, machine: Machine, nbytes: float, proto: str) -> Timed:
        """Return an all_reduce of GPUs that are linked pairwise: each sends every other its part, adds up its own
        and sends that to all (MSCCL).
        """
        share = 2 * nbytes / group.size
        cost = self.cost(machine, proto, nbytes / group.size / 4096.0, 1.64)
        software_s = (self._of("launch", proto) + 2 * self._of(self.generation(machine), f"hop_{proto}")) * 1e-6
        cost = replace(cost, edge_bytes_per_s=math.inf)
        return Timed(software_s, direct_phase(group, all_to_all_loads(group), share, cost, hops=2.0), cost)

    def pat(self, group: Members, machine: Machine, op: str, nbytes: float) -> Timed:
        """Time PAT, which has a tree for each rank's part: log2(n) rounds, then three quarters of a ring's
        bandwidth.

        The figures are NCCL's own (tuning.cc): a round has 1 / 3.5 of the latency of a ring's, and 2.8 us per rank.
        """
        ring = self.ring(group, machine, op, nbytes, "Simple")
        _, inter_s = self.hops_s(machine, "ring", "Simple")
        software_s = 8e-6 + math.log2(machine.num_nodes) * inter_s / 3.5 + 2.8e-6 * machine.num_ranks
        loads = Loads(ring.phase.loads.links, ring.phase.loads.weights / 0.75)
        far_s = math.log2(machine.num_nodes) * self.cluster.node.nic_latency_s
        moved = Shape.of(op, group.size, nbytes).edge_bytes
        return Timed(
            software_s, PlanPhase(loads, moved, latency_s=far_s, streams=group.streams_at(ring.cost)), ring.cost
        )

    def nvls(self, group: Members, machine: Machine, op: str, nbytes: float, tree: bool) -> Timed:
        """Time NVLS on one NVSwitch, or NVLSTree."""
        name = self.generation(machine)
        limit = INFINITY
        if machine.has_fewer_nvls_channels:
            busbw = 1e9 * machine.nvls_channels * nvls_channel_gbps(machine)
            limit = busbw * group.size / steps_of(op, group.size)  # of the buffer
        wire = 1.0 / self._of(name, "nvls")
        cost = TransferCost(wire, self.net_wire(machine), edge_bytes_per_s=limit, intra_links=0.0)
        software_s = self._of(name, "nvls_base") * 1e-6
        hop_s = self.hops_s(machine, "tree", "Simple")[1]
        if tree:
            _, between = tree_hops(group)
            there_and_back_s = 2 * hop_s * self._of("launch", "nvls_tree_hop")
            phase = nvls_tree_phase(group, nbytes, cost)
            slowest = group.slowest_s_per_byte(phase.loads) * self._of("launch", "nvls_tree_fill")

            def fill_s(at: Machine) -> float:
                # The switch adds up a chunk before it goes up the tree, and has it all when it comes down to multicast
                # it: that of the first and of the last chunk is beside nothing.
                loop = nvls_tree_loop_bytes(at, nbytes)
                return 2.0 * loop * nbytes / (loop + nbytes) * slowest

            # Smaller chunks on more nodes are held to make up for no more than the longer way.
            pair = replace(machine, num_nodes=2, num_ranks=2 * machine.num_ranks // machine.num_nodes)
            fill = max(fill_s(machine), fill_s(pair) - (between - 1) * there_and_back_s)
            return Timed(software_s + between * there_and_back_s + fill, phase, cost)
        if machine.num_nodes > 1:
            software_s += hop_s
        phase = nvls_phase(group, op, nbytes, cost)
        slowest = group.slowest_s_per_byte(phase.loads)
        # The more GPUs, the smaller each one's part of a chunk: 72 fill their pipeline nine times as long as
        # 8.
        fill = self._of("launch", "fill") * max(1.0, group.per_domain / 8.0)
        software_s += fill * min(nbytes, 2**28) * slowest
        return Timed(software_s, phase, cost)

    def direct(
        self, group: Members, machine: Machine, peers: int, share: float, loads: Loads
    ) -> tuple[float, TransferCost]:
        """Return the software latency and the cost of grouped sends and receives of *share* bytes with each of
        *peers* peers.

        The latency consists of one message inside a node, one hop with protocol Simple, and one more copy of a chunk
        for every peer. Messages through the NIC add their own cost, if that takes longer than their bytes. A thread
        that sends through sockets moves the bytes itself, after the cost of each message. Launching the kernel is
        not included.
        """
        name, many = self.generation(machine), machine.num_nodes > 1
        near = min(peers, group.per_domain)
        software_s = (self._of("p2p", "base") + self._of("p2p", "per_peer") * near) * 1e-6
        net, first_s, later_s = 1.0, 0.0, 0.0
        if many:
            table = self.matching(machine)
            # One peer is a ring's neighbour.
            net = max(self.lost(machine, ring=peers == 1) / self._of(table, "p2p_efficiency"), self.root_wire())
            first_s = self._of(table, "remote") * 1e-6
            if share <= self._of(table, "tiny_bytes"):
                first_s *= self._of(table, "remote_tiny")
            later_s = first_s * (peers - near - 1 if peers > 1 else 0)
            software_s += (self.hop_us(table) * self._of(table, "p2p") + self._of(table, "ring_more")) * 1e-6
        cost = TransferCost(1.0 / self._of(name, "p2p"), net, intra_links=0.0)
        if many:
            copied = group.slowest_s_per_byte(group.with_cost(loads, replace(cost, net_wire=1.0)))
            software_s += self._of("p2p", "fill") * min(share, 131072.0) * copied
            if self.net in _BY_THE_HOST:
                software_s = max(software_s, first_s + later_s)
            else:
                moved_s = share * group.slowest_s_per_byte(group.with_cost(loads, cost))
                software_s += first_s + max(later_s - moved_s, 0.0)
        return software_s, cost
