"""A cluster: its links, its devices in rank order, and the routes between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from distsim.cluster.graph.fabrics import Fabric, TreeFabric, mix
from distsim.cluster.graph.link import Constant, CpuModel, Links, NcclFacts, NodeModel, Slot, Vertex
from distsim.errors import UsageError
from distsim.text.units import plural

if TYPE_CHECKING:
    import networkx

    from distsim.cluster.files.spec import ClusterSpec
    from distsim.cluster.graph.host_template import HostTemplate

# -- Routes of many pairs at once: what `HostsOnFabric.route` says of each, put together by whole columns.
#
# Hosts are alike, so the wires inside one come from tables by local device and NIC, moved to the host's block of links.

Places = NDArray[np.int64]
"""Positions of devices in rank order, or numbers of NICs."""
Rows = NDArray[np.int64]
"""Routes as one array: a row for each pair of devices with its link indices in order, padded with -1."""


def padded(paths: Sequence[Sequence[int]]) -> Rows:
    """Return *paths* as one array, padded with -1."""
    width = max(map(len, paths), default=0)
    return np.array([[*path, *[-1] * (width - len(path))] for path in paths], dtype=np.int64).reshape(len(paths), width)


def one_by_one(
    route: Callable[[int, int, int, int | None, int | None], tuple[int, ...]],
    src: Places,
    dst: Places,
    key: int,
    rails: Places,
    enters: Places,
) -> Rows:
    """Return the routes of many pairs, computed one by one with *route*."""
    requests = zip(src.tolist(), dst.tolist(), rails.tolist(), enters.tolist(), strict=True)
    return padded(
        [route(a, b, key, None if rail < 0 else rail, None if enter < 0 else enter) for a, b, rail, enter in requests]
    )


def mixed(*values: NDArray[np.int64] | int) -> NDArray[np.uint64]:
    """Return `fabrics.mix` of each row."""
    state = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)
    for value in values:
        plain = np.uint64(value & 0xFFFFFFFFFFFFFFFF) if isinstance(value, int) else value.astype(np.uint64)
        with np.errstate(over="ignore"):
            state = (state ^ plain) * np.uint64(0xBF58476D1CE4E5B9)
            state = state ^ (state >> np.uint64(27))
            state = state * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


class Wires:
    """The paths inside a host as arrays indexed by [device, device or NIC, step], padded with -1."""

    def __init__(self, template: HostTemplate) -> None:
        self.between, self.apart = _table(template.between_devices)
        self.out, self.no_way_out = _table(template.to_nic)
        self.back, self.no_way_back = _table(template.from_nic)
        self.own = padded(template.own_nics)
        """Numbers of the NICs that each device uses."""
        self.num_own = np.array([len(nics) for nics in template.own_nics], dtype=np.int64)


def _table(paths: list[list[tuple[int, ...] | None]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the paths as one array, and a mask of the pairs that have a path."""
    rows, columns = len(paths), len(paths[0]) if paths else 0
    flat = padded([path or () for row in paths for path in row])
    return flat.reshape(rows, columns, flat.shape[1]), np.array([[path is None for path in row] for row in paths])


def routes(
    wires: Wires,
    fabric: Fabric,
    src: Places,
    dst: Places,
    key: int,
    rails: Places,
    enters: Places,
    *,
    block: int,
    nic_base: int,
    cable_base: int,
) -> Rows | None:
    """Return the routes from devices *src* to devices *dst* through NICs and fabric; None if a pair has no route.

    *rails* are the NICs by which the data leave and *enters* those by which they arrive (-1: one of the device's own).
    """
    per_host, num_nics = wires.out.shape[:2]
    (host, i), (other, j) = np.divmod(src, per_host), np.divmod(dst, per_host)
    flow = mixed(src, dst, key)
    ends: list[NDArray[np.int64]] = []
    for device, forced in ((i, rails), (j, enters)):
        own = wires.num_own[device]
        if ((forced < 0) & (own == 0)).any() or (forced >= num_nics).any():
            return None
        turn = (flow % np.maximum(own, 1).astype(np.uint64)).astype(np.int64)
        ends.append(np.where(forced < 0, wires.own[device, turn], forced) if wires.own.shape[1] else forced)
    leave, enter = ends
    if wires.no_way_out[i, leave].any() or wires.no_way_back[enter, j].any():
        return None
    first, last = host * block, other * block
    cables = _cables(fabric, fabric.attach(host, leave), fabric.attach(other, enter), flow >> np.uint64(16))
    return np.hstack(
        [
            _moved(wires.out[i, leave], first),
            (first + nic_base + 2 * leave)[:, None],
            np.where(cables < 0, -1, cables + cable_base),
            (last + nic_base + 2 * enter + 1)[:, None],
            _moved(wires.back[enter, j], last),
        ]
    )


def _cables(fabric: Fabric, src: Any, dst: Any, key: NDArray[np.uint64]) -> Rows:
    if isinstance(fabric, TreeFabric):
        return fabric.paths(src, dst, key)
    return padded([fabric.path(*request) for request in zip(src.tolist(), dst.tolist(), key.tolist(), strict=True)])


def _moved(local: Rows, base: NDArray[np.int64]) -> Rows:
    return np.where(local < 0, -1, local + base[:, None])


# -- A cluster: its links, its devices in rank order, and the route between any two of them.

_MAX_CACHED_ROUTES = 1 << 18


class Wiring(Protocol):
    """Vertices and links of a cluster, and the routes through them."""

    @property
    def vertices(self) -> Sequence[Vertex]:
        """Return the vertices, those of the hosts first."""

    @property
    def links(self) -> Links:
        """Return links by index."""

    @property
    def devices(self) -> list[str]:
        """Return the devices in rank order."""

    def route(self, src: int, dst: int, flow_key: int, rail: int | None) -> tuple[int, ...]:
        """Return link indices from the device at position *src* to that at *dst*."""

    def routes(self, src: Places, dst: Places, flow_key: int, rails: Places, enters: Places | None = None) -> Rows:
        """Return the routes of many pairs, one row each, padded with -1.

        *rails* are the NICs by which the data leave (-1: any); *enters* are those by which they arrive, if different.
        """

    def bisection_bandwidth_bytes_per_s(self) -> float:
        """Return the bytes/s that the two halves of the devices can exchange in one direction."""


class Cluster:
    """An immutable cluster of equal hosts and the network that connects them. Created by `load_cluster`."""

    def __init__(
        self,
        name: str,
        num_nodes: int,
        wiring: Wiring,
        cpu: CpuModel,
        node: NodeModel,
        nccl: NcclFacts,
        *,
        calibration: Mapping[str, float] | None = None,
        constants: Mapping[str, Constant] | None = None,
        errors: Mapping[str, tuple[float, float, tuple[str, ...]]] | None = None,
        measured: str = "",
        variant: str = "",
        description: str = "",
        source: str = "",
        spec: ClusterSpec | None = None,
        nodes: Sequence[NodeModel] = (),
    ) -> None:
        self.name = name
        self.num_nodes = num_nodes
        self.cpu = cpu
        self.node = node
        """Properties of a node; of several kinds of node the least that each has, and the GPU of the first."""
        self._nodes = nodes
        self.nccl = nccl
        self.calibration: Mapping[str, float] = dict(calibration or {})
        self.constants: Mapping[str, Constant] = dict(constants or {})
        """Constants of the NCCL model that replace its own, by `table.key` of collectives/fitted/nccl.toml."""
        self.errors: Mapping[str, tuple[float, float, tuple[str, ...]]] = dict(errors or {})
        """10th and 90th percentile of measured / simulated time in the cluster's own logs, by `NODES, SIZE`
        (uncertainty.py).
        """
        self.measured = measured
        self.variant = variant
        self.description = description
        self.source = source
        self._wiring = wiring
        self.spec = spec
        self.warnings: list[str] = []
        """Warnings about settings of the file that have no effect, one sentence each."""
        self._routes: dict[tuple[str, str, int, int | None], tuple[int, ...]] = {}
        self.worked_out: dict[Any, Any] = {}
        """Cache in which other modules (collectives/compiler.py) store values that they derive from the cluster."""

    def __repr__(self) -> str:
        size = f"{plural(self.num_nodes, 'node')}, {len(self.devices)} devices, {len(self.links)} links"
        return f"<Cluster {self.name}: {size}>"

    @property
    def vertices(self) -> Sequence[Vertex]:
        """Return every piece of hardware, hosts first."""
        return self._wiring.vertices

    @property
    def links(self) -> Links:
        """Return every directed link; the index of a link is its position."""
        return self._wiring.links

    @property
    def devices(self) -> list[str]:
        """Return the names of the devices in rank order: accelerators, or CPU sockets if a node has none."""
        return self._wiring.devices

    @cached_property
    def graph(self) -> networkx.DiGraph[str]:
        """Return the cluster as a networkx graph. Vertices have the attributes kind, host and local; edges those of
        `Link`.
        """
        import networkx

        graph: networkx.DiGraph[str] = networkx.DiGraph(name=self.name)
        for vertex in self.vertices:
            graph.add_node(vertex.name, kind=vertex.kind, host=vertex.host, local=vertex.local)
        for link in self.links:
            graph.add_edge(
                link.src,
                link.dst,
                index=link.index,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
                latency_s=link.latency_s,
                kind=link.kind,
            )
        return graph

    def node_of(self, host: int) -> NodeModel:
        """Return the properties of node *host*."""
        return self._nodes[host] if self._nodes else self.node

    @cached_property
    def kinds(self) -> list[tuple[NodeModel, list[int]]]:
        """Return the kinds of node with the numbers of their nodes, the first node's kind first."""
        kinds: list[tuple[NodeModel, list[int]]] = []
        for host in range(self.num_nodes):
            known = next((hosts for node, hosts in kinds if node == self.node_of(host)), None)
            if known is None:
                kinds.append((self.node_of(host), [host]))
            else:
                known.append(host)
            if not self._nodes:
                return [(self.node, list(range(self.num_nodes)))]
        return kinds

    def place(self, nnodes: int | None = None, nproc_per_node: int | None = None) -> list[Slot]:
        """Return a slot for every rank: *nproc_per_node* on each of the first *nnodes* nodes; by default one for each
        device.

        A node without accelerators takes at most one rank per core, distributed over its sockets in blocks.
        """
        per_node = len(self.devices) // self.num_nodes
        room = per_node if self.node.num_gpus else self.cpu.num_sockets * self.cpu.cores_per_socket
        nodes = self.num_nodes if nnodes is None else nnodes
        ranks = per_node if nproc_per_node is None else nproc_per_node
        if nodes < 1 or ranks < 1:
            raise UsageError(
                f"expected at least one node and one rank a node, got nnodes={nodes}, nproc_per_node={ranks}"
            )
        if nodes > self.num_nodes or ranks > room:
            unit = "accelerators" if self.node.num_gpus else "cores"
            raise UsageError(
                f"asked for {nodes * ranks} ranks ({plural(nodes, 'node')} x {ranks}), the cluster {self.name} has "
                f"{self.num_nodes * room} ({plural(self.num_nodes, 'node')} x {room} {unit}): "
                "lower --nnodes or --nproc-per-node, or name a larger cluster with --on"
            )
        slots: list[Slot] = []
        for host in range(nodes):
            for local in range(ranks):
                index = local if ranks <= per_node else local * per_node // ranks
                slots.append(Slot(len(slots), host, local, self.devices[host * per_node + index]))
        return slots

    def route(self, src_device: str, dst_device: str, flow_key: int = 0, rail: int | None = None) -> tuple[int, ...]:
        """Return the indices of the links from one device to another, in order; empty from an accelerator to itself.

        Among equal routes, *flow_key* decides like a switch's hash of a flow. *rail* forces a NIC at both ends of a
        route between hosts; by default each end uses one of its closest NICs.
        """
        key = (src_device, dst_device, flow_key, rail)
        result = self._routes.get(key)
        if result is None:
            if len(self._routes) >= _MAX_CACHED_ROUTES:
                self._routes.clear()
            result = self._routes[key] = self._wiring.route(
                self._position(src_device), self._position(dst_device), flow_key, rail
            )
        return result

    def routes(self, src: Places, dst: Places, flow_key: int, rails: Places, enters: Places | None = None) -> Rows:
        """Return `route` of many pairs at once, between positions in `devices`: one row of links each, padded with -1.

        *rails* are the NICs by which the data leave (-1: any); *enters* are those by which they arrive, if different.
        """
        return self._wiring.routes(src, dst, flow_key, rails, enters)

    @cached_property
    def positions(self) -> dict[str, int]:
        """Return the position of each name in `devices`."""
        return {device: position for position, device in enumerate(self.devices)}

    def _position(self, device: str) -> int:
        try:
            return self.positions[device]
        except KeyError:
            raise UsageError(
                f"expected a device of {self.name} ({self.devices[0]} to {self.devices[-1]}), got {device!r}"
            ) from None

    def bisection_bandwidth_bytes_per_s(self) -> float:
        """Return the bytes/s that the first half of the devices can send to the second half at once, in one direction.

        Nodes (or NVLink domains) are not split if there are several. Only links that lie on routes between the halves
        count.
        """
        return self._wiring.bisection_bandwidth_bytes_per_s()

    def to_toml(self) -> str:
        """Return the cluster as TOML that `load_cluster` reads, with every key explained."""
        if self.spec is None:
            reason = "has nodes of several kinds" if len(self.kinds) > 1 else "was imported as a graph"
            raise UsageError(f"{self.name} {reason} and has no TOML form: use --node-link or --graphml")
        from distsim.cluster.files.spec import to_toml

        return to_toml(self.spec)


# -- Routes around links that are down: what a fabric's routing finds once it has noticed.
#
# Only switches route anew. A NIC, a PCIe slot or an NVLink that is down has nobody before it who could
# choose another one, so a route whose host is cut off stays as it is, and stalls.

SWITCHES = ("leaf", "spine", "switch")


class Reroute:
    """Routes of *cluster* that avoid the links *down*."""

    def __init__(self, cluster: Cluster, down: Collection[int]) -> None:
        self._links = cluster.links
        self._down = frozenset(down)
        self._switches = frozenset(v.name for v in cluster.vertices if v.kind in SWITCHES)
        self._into: dict[str, list[int]] = {}
        self._out: dict[str, list[int]] = {}
        for link in cluster.links:
            if link.index not in self._down and link.src in self._switches and link.dst in self._switches:
                self._into.setdefault(link.dst, []).append(link.index)
                self._out.setdefault(link.src, []).append(link.index)
        self._hops: dict[str, dict[str, int]] = {}

    def route(self, route: tuple[int, ...], key: int = 0) -> tuple[int, ...]:
        """Return *route* with the part between its switches replaced by the shortest path over links that are up.

        Among equal paths a hash of the ends and *key* decides. The route is unchanged if none of its links is down, or
        if there is no other path.
        """
        if self._down.isdisjoint(route):
            return route
        links = self._links
        inside = [i for i, n in enumerate(route) if links[n].src in self._switches and links[n].dst in self._switches]
        if not inside:
            return route
        first, last = inside[0], inside[-1]
        if not self._down.isdisjoint(route[:first] + route[last + 1 :]):
            return route
        here, goal = links[route[first]].src, links[route[last]].dst
        hops = self._hops_to(goal)
        if here not in hops:
            return route
        way: list[int] = []
        while here != goal:
            onwards = [n for n in self._out[here] if hops.get(links[n].dst, len(links)) == hops[here] - 1]
            way.append(onwards[mix(route[0], route[-1], key, len(way)) % len(onwards)])
            here = links[way[-1]].dst
        return (*route[:first], *way, *route[last + 1 :])

    def _hops_to(self, goal: str) -> dict[str, int]:
        """Return the number of links from each switch to *goal*."""
        if goal not in self._hops:
            hops, waiting = {goal: 0}, deque([goal])
            while waiting:
                here = waiting.popleft()
                for number in self._into.get(here, ()):
                    before = self._links[number].src
                    if before not in hops:
                        hops[before] = hops[here] + 1
                        waiting.append(before)
            self._hops[goal] = hops
        return self._hops[goal]


def connections(cluster: Cluster) -> list[tuple[str, list[str], int]]:
    """Return how the GPUs and NICs of a host are connected, in the terms of `nvidia-smi topo -m`.

    Args:
        cluster: Any cluster, of which only the first host is read.

    Returns:
        For each GPU and then each NIC: its name, its connection to each of them, and its socket. NV#: # NVLinks.
        PIX: through one PCIe switch. PHB: through the host bridge of a socket. NODE: within a socket. SYS: between
        sockets.
    """
    if connections in cluster.worked_out:
        known: list[tuple[str, list[str], int]] = cluster.worked_out[connections]
        return known
    kinds = {vertex.name: vertex.kind for vertex in cluster.vertices if vertex.host == 0}
    above: dict[str, str] = {}
    nvlinks: dict[str, set[str]] = {}
    for link in cluster.links:
        if link.src in kinds and link.kind == "nvlink":
            nvlinks.setdefault(link.src, set()).add(link.dst)
        elif link.kind in ("pcie", "c2c") and kinds.get(link.dst) in ("pcie", "cpu") and kinds.get(link.src) != "cpu":
            above.setdefault(link.src, link.dst)
    names = sorted((name for name, kind in kinds.items() if kind in ("gpu", "nic")), key=lambda name: kinds[name])
    sockets = [name for name, kind in kinds.items() if kind == "cpu"]

    def socket(name: str) -> str:
        while kinds.get(name) != "cpu" and name in above:
            name = above[name]
        return name

    def between(one: str, other: str) -> str:
        if one == other:
            return "X"
        reached = nvlinks.get(one, set())
        if other in reached:
            return f"NV{max(1, cluster.node.nvlinks_per_gpu // len(reached))}"
        if reached & nvlinks.get(other, set()):
            return f"NV{cluster.node.nvlinks_per_gpu}"
        if above.get(one) == above.get(other):
            return "PHB" if kinds.get(above.get(one, "")) == "cpu" else "PIX"
        return "NODE" if socket(one) == socket(other) else "SYS"

    rows = []
    for name in names:
        title = f"{kinds[name].upper()}{name.partition('/')[2].removeprefix(kinds[name])}"
        number = sockets.index(socket(name)) if socket(name) in sockets else 0
        rows.append((title, [between(name, other) for other in names], number))
    cluster.worked_out[connections] = rows
    return rows
