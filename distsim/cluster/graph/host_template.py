"""One host as a small graph that all hosts of a cluster share, with the paths between its parts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distsim.cluster.files.spec import NodeSpec

# A path is chosen for a transfer of this size: latency decides between links of equal speed, speed otherwise.
_TYPICAL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TemplatePart:
    """A vertex of the host: its local name (`gpu3`), kind, and index among its kind."""

    name: str
    kind: str
    local: int


@dataclass(frozen=True, slots=True)
class Wire:
    """A directed link between two parts of the host."""

    src: str
    dst: str
    bandwidth_bytes_per_s: float
    latency_s: float
    kind: str


@dataclass(frozen=True)
class HostTemplate:
    """A host's parts and links. *devices* take ranks, and *nics* lead to the network.

    *port* is the number of a device's port to an NVSwitch that several hosts share; None if NVLink ends at the host.
    """

    parts: tuple[TemplatePart, ...]
    wires: tuple[Wire, ...]
    devices: tuple[str, ...]
    nics: tuple[str, ...]
    port: tuple[float, float] | None = None
    staged_peers: bool = False
    """Whether GPUs without NVLink exchange data through host memory.

    The sender writes to the host memory of the receiver's socket, and the receiver reads it there (NCCL's SHM
    transport; the receiver's side is the default of NCCL_SHM_LOCALITY).
    """
    staged_nics: bool = False
    """Whether a NIC cannot access GPU memory, so that its data pass through the host memory of the GPU's socket (NCCL
    without GPUDirect RDMA).
    """

    def staged(self, node: NodeSpec) -> HostTemplate:
        """Return this host with the host memory through which *node* says that GPUs or NICs exchange data.

        Host memory is a loop at each socket with half the memory's bandwidth, because every byte is written and read.
        """
        peers = bool(node.gpus) and not node.pcie.peer_to_peer
        nics = bool(node.gpus) and node.nic is not None and not node.nic.gpu_direct
        rate = node.cpu.memory_bandwidth * node.cpu.memory_efficiency / 2
        sockets = [part.name for part in self.parts if part.kind == "cpu"] if peers or nics else []
        loops = tuple(Wire(name, name, rate, 0.0, "memory") for name in sockets)
        return replace(self, wires=self.wires + loops, staged_peers=peers, staged_nics=nics)

    @cached_property
    def _memory(self) -> dict[str, int]:
        """Return for each socket the link that represents its memory."""
        return {wire.src: index for index, wire in enumerate(self.wires) if wire.kind == "memory"}

    def _socket(self, device: str) -> str | None:
        """Return the socket whose memory *device* reaches at the lowest cost."""
        tree = self._trees[device]
        near = [(tree[name][0], name) for name in self._memory if name in tree]
        return min(near)[1] if near else None

    @cached_property
    def _trees(self) -> dict[str, dict[str, tuple[float, tuple[int, ...]]]]:
        return {part.name: self.tree(part.name) for part in self.parts if part.kind in ("gpu", "cpu", "nic")}

    def _through_memory(self, src: str, dst: str, socket: str | None) -> tuple[int, ...] | None:
        """Return the links from *src* into the memory of *socket* and on to *dst*."""
        if socket is None or socket not in self._trees[src] or dst not in self._trees[socket]:
            return None
        return (*self._trees[src][socket][1], self._memory[socket], *self._trees[socket][dst][1])

    @cached_property
    def _next(self) -> dict[str, list[tuple[str, int, float]]]:
        """Return the neighbors of each part with the cost of the link."""
        outgoing: dict[str, list[tuple[str, int, float]]] = {part.name: [] for part in self.parts}
        for index, wire in enumerate(self.wires):
            cost = wire.latency_s + _TYPICAL_BYTES / wire.bandwidth_bytes_per_s
            outgoing[wire.src].append((wire.dst, index, cost))
        return outgoing

    @cached_property
    def _gpus(self) -> frozenset[str]:
        return frozenset(part.name for part in self.parts if part.kind == "gpu")

    def tree(self, source: str) -> dict[str, tuple[float, tuple[int, ...]]]:
        """Return the lowest cost and the path from *source* to every part.

        Paths do not pass through NICs, and pass through GPUs only to or from NVLink.
        """
        result: dict[str, tuple[float, tuple[int, ...]]] = {}
        least: dict[str, tuple[float, int]] = {}
        heap: list[tuple[float, int, str, tuple[int, ...]]] = [(0.0, 0, source, ())]
        while heap:
            cost, _, here, path = heapq.heappop(heap)
            if here in result:
                continue
            result[here] = (cost, path)
            if here in self.nics and here != source:
                continue
            picky = here in self._gpus and here != source and self.wires[path[-1]].kind != "nvlink"
            for there, index, step in self._next[here]:
                if there in result or (picky and self.wires[index].kind != "nvlink"):
                    continue
                far = cost + step, len(path) + 1
                if far <= least.setdefault(there, far):
                    least[there] = far
                    heapq.heappush(heap, (*far, there, (*path, index)))
        return result

    @cached_property
    def between_devices(self) -> list[list[tuple[int, ...] | None]]:
        """Return the links from device i to device j; None if nothing inside the host connects them.

        Ranks on CPU sockets communicate by TCP, so their paths begin with the loopback of the sender's socket.
        """
        loops = {wire.src: (index,) for index, wire in enumerate(self.wires) if wire.kind == "loopback"}
        rows: list[list[tuple[int, ...] | None]] = []
        for source in self.devices:
            tree, loop = self._trees[source], loops.get(source, ())
            rows.append([(*loop, *tree[device][1]) if device in tree else None for device in self.devices])
        if self.staged_peers:
            for i, row in enumerate(rows):
                for j, path in enumerate(row):
                    if i != j and (path is None or any(self.wires[index].kind != "nvlink" for index in path)):
                        source, device = self.devices[i], self.devices[j]
                        row[j] = self._through_memory(source, device, self._socket(device)) or path
        return rows

    @cached_property
    def to_nic(self) -> list[list[tuple[int, ...] | None]]:
        """Return the links from device i to NIC k."""
        if self.staged_nics:
            return [[self._through_memory(one, nic, self._socket(one)) for nic in self.nics] for one in self.devices]
        trees = [self._trees[device] for device in self.devices]
        return [[tree[nic][1] if nic in tree else None for nic in self.nics] for tree in trees]

    @cached_property
    def from_nic(self) -> list[list[tuple[int, ...] | None]]:
        """Return the links from NIC k to device i."""
        if self.staged_nics:
            return [[self._through_memory(nic, one, self._socket(one)) for one in self.devices] for nic in self.nics]
        trees = [self._trees[nic] for nic in self.nics]
        return [[tree[device][1] if device in tree else None for device in self.devices] for tree in trees]

    @cached_property
    def own_nics(self) -> list[tuple[int, ...]]:
        """Return the NICs that each device uses: the closest ones, divided evenly among the devices that share them."""
        nearest: list[tuple[int, ...]] = []
        for device in self.devices:
            tree = self._trees[device]
            costs = {k: round(tree[nic][0] * 1e12) for k, nic in enumerate(self.nics) if nic in tree}
            least = min(costs.values(), default=0)
            nearest.append(tuple(k for k, cost in costs.items() if cost == least))
        own: list[tuple[int, ...]] = []
        for i, choice in enumerate(nearest):
            group = [j for j, other in enumerate(nearest) if other == choice]
            own.append(_portion(choice, group.index(i), len(group)))
        return own


def _portion(items: Sequence[int], k: int, shares: int) -> tuple[int, ...]:
    if not items:
        return ()
    first, last = k * len(items) // shares, (k + 1) * len(items) // shares
    return tuple(items[first : max(last, first + 1)])


def build_host(node: NodeSpec) -> HostTemplate:
    """Build the host that *node* describes. Parts are spread evenly: GPU i is under switch i * switches // gpus, and
    so on.
    """
    parts: list[TemplatePart] = []
    wires: list[Wire] = []

    def add(kind: str, count: int) -> list[str]:
        names = [f"{kind}{index}" for index in range(count)]
        parts.extend(TemplatePart(name, kind, index) for index, name in enumerate(names))
        return names

    def join(a: str, b: str, bandwidth: float, latency: float, kind: str) -> None:
        wires.append(Wire(a, b, bandwidth, latency, kind))
        wires.append(Wire(b, a, bandwidth, latency, kind))

    cpu, pcie, nic = node.cpu, node.pcie, node.nic
    gpus = add("gpu", node.gpus)
    port = _join_nvlink(node, gpus, add, join)
    sockets = add("cpu", cpu.sockets)
    nics = add("nic", nic.count if nic else 0)
    switches = add("pcie", pcie.switches)
    slot = pcie.bandwidth * pcie.efficiency

    def root(index: int, count: int) -> str:
        """Return the switch or socket above the slot of device *index* of *count*."""
        above = switches or sockets
        return above[index * len(above) // count]

    for index, name in enumerate(gpus):
        if pcie.c2c is not None:
            join(name, sockets[index * len(sockets) // len(gpus)], pcie.c2c, pcie.latency, "c2c")
        else:
            join(name, root(index, len(gpus)), slot, pcie.latency, "pcie")
    for index, name in enumerate(nics):
        join(name, root(index, len(nics)), slot, pcie.latency, "pcie")
    for index, name in enumerate(switches):
        join(name, sockets[index * len(sockets) // len(switches)], slot, pcie.latency, "pcie")
    for i, one in enumerate(sockets):
        for other in sockets[i + 1 :]:
            join(one, other, cpu.interconnect, cpu.interconnect_latency, "socket")
    if not gpus:
        wires.extend(Wire(name, name, cpu.loopback, cpu.loopback_latency, "loopback") for name in sockets)
    return HostTemplate(tuple(parts), tuple(wires), tuple(gpus or sockets), tuple(nics), port)


def _join_nvlink(
    node: NodeSpec,
    gpus: list[str],
    add: Callable[[str, int], list[str]],
    join: Callable[[str, str, float, float, str], None],
) -> tuple[float, float] | None:
    nvlink = node.gpu.nvlink if node.gpu else None
    if nvlink is None or not gpus:
        return None
    bandwidth = nvlink.links * nvlink.bandwidth * nvlink.efficiency
    if nvlink.domain_nodes > 1:
        return bandwidth, nvlink.latency / 2
    if nvlink.topology == "nvswitch":
        (switch,) = add("nvswitch", 1)
        for name in gpus:
            join(name, switch, bandwidth, nvlink.latency / 2, "nvlink")
    else:
        for i, one in enumerate(gpus):
            for other in gpus[i + 1 :]:
                join(one, other, bandwidth / (len(gpus) - 1), nvlink.latency, "nvlink")
    return None
