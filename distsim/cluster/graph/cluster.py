"""A cluster: its links, its devices in rank order, and the route between any two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from distsim.cluster.graph.facts import Constant, CpuModel, NcclFacts, NodeModel
from distsim.cluster.graph.link import Links, Slot, Vertex
from distsim.cluster.graph.many_routes import Places, Rows
from distsim.errors import UsageError

if TYPE_CHECKING:
    import networkx

    from distsim.cluster.files.spec import ClusterSpec

__all__ = ["Cluster", "Wiring"]

_MAX_CACHED_ROUTES = 1 << 18


class Wiring(Protocol):
    """Vertices and links, and how to find a way through them."""

    @property
    def vertices(self) -> Sequence[Vertex]:
        """Hosts first."""

    @property
    def links(self) -> Links:
        """By index."""

    @property
    def devices(self) -> list[str]:
        """In rank order."""

    def route(self, src: int, dst: int, flow_key: int, rail: int | None) -> tuple[int, ...]:
        """Link indices from the device at position *src* to that at *dst*."""

    def routes(self, src: Places, dst: Places, flow_key: int, rails: Places, enters: Places | None = None) -> Rows:
        """The same of many, a row each, -1 in places that a way does not need; *rails* are -1 where none is forced,
        *enters* the NICs by which they come in, where these are others."""

    def bisection_bandwidth_bytes_per_s(self) -> float:
        """What the two halves of the devices can exchange, in one direction."""


class Cluster:
    """Hosts of one kind, and what connects them. Made by `load_cluster`; never changes."""

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
    ) -> None:
        self.name = name
        self.num_nodes = num_nodes
        self.cpu = cpu
        self.node = node
        self.nccl = nccl
        self.calibration: Mapping[str, float] = dict(calibration or {})
        self.constants: Mapping[str, Constant] = dict(constants or {})
        """Of the model of NCCL, in place of its own: by `table.key` of calibration/nccl.toml."""
        self.errors: Mapping[str, tuple[float, float, tuple[str, ...]]] = dict(errors or {})
        """10th and 90th percentile of measured / simulated time in its own logs, by `NODES, SIZE` (uncertainty.py)."""
        self.measured = measured
        self.variant = variant
        self.description = description
        self.source = source
        self._wiring = wiring
        self.spec = spec
        self._routes: dict[tuple[str, str, int, int | None], tuple[int, ...]] = {}
        self.worked_out: dict[Any, Any] = {}
        """What others have worked out of it, once for all who ask (collectives/compiler.py)."""

    def __repr__(self) -> str:
        size = f"{_nodes(self.num_nodes)}, {len(self.devices)} devices, {len(self.links)} links"
        return f"<Cluster {self.name}: {size}>"

    @property
    def vertices(self) -> Sequence[Vertex]:
        """Every piece of hardware, hosts first."""
        return self._wiring.vertices

    @property
    def links(self) -> Links:
        """Every directed link; a link's index is its position."""
        return self._wiring.links

    @property
    def devices(self) -> list[str]:
        """Vertices that take a rank, in rank order: accelerators, or sockets where a node has none."""
        return self._wiring.devices

    @cached_property
    def graph(self) -> networkx.DiGraph[str]:
        """The same as a networkx graph: vertices have kind, host, local; edges what their `Link` has."""
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

    def place(self, nnodes: int | None = None, nproc_per_node: int | None = None) -> list[Slot]:
        """A slot for every rank: *nproc_per_node* on each of the first *nnodes* nodes, all devices by
        default.

        A node without accelerators takes up to a rank a core, spread over its sockets in blocks.
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
                f"asked for {nodes * ranks} ranks ({_nodes(nodes)} x {ranks}), the cluster {self.name} has "
                f"{self.num_nodes * room} ({_nodes(self.num_nodes)} x {room} {unit}): "
                "lower --nnodes or --nproc-per-node, or name a larger cluster with --on"
            )
        slots: list[Slot] = []
        for host in range(nodes):
            for local in range(ranks):
                index = local if ranks <= per_node else local * per_node // ranks
                slots.append(Slot(len(slots), host, local, self.devices[host * per_node + index]))
        return slots

    def route(self, src_device: str, dst_device: str, flow_key: int = 0, rail: int | None = None) -> tuple[int, ...]:
        """Indices of the links from one device to another, in order; empty from an accelerator to itself.

        Among equal ways, *flow_key* decides, as a switch's hash of a flow does. *rail* forces NIC *rail* at
        both ends of a way between hosts; by default each end uses a NIC closest to it.
        """
        asked = (src_device, dst_device, flow_key, rail)
        found = self._routes.get(asked)
        if found is None:
            if len(self._routes) >= _MAX_CACHED_ROUTES:
                self._routes.clear()
            found = self._routes[asked] = self._wiring.route(
                self._position(src_device), self._position(dst_device), flow_key, rail
            )
        return found

    def routes(self, src: Places, dst: Places, flow_key: int, rails: Places, enters: Places | None = None) -> Rows:
        """`route` of many at once, between positions in `devices`: a row of links each, -1 in places that a way does
        not need. *rails* are -1 where none is forced, *enters* the NICs by which they come in, where these are
        others."""
        return self._wiring.routes(src, dst, flow_key, rails, enters)

    @cached_property
    def positions(self) -> dict[str, int]:
        """Of the names in `devices`."""
        return {device: position for position, device in enumerate(self.devices)}

    def _position(self, device: str) -> int:
        try:
            return self.positions[device]
        except KeyError:
            raise UsageError(
                f"expected a device of {self.name} ({self.devices[0]} to {self.devices[-1]}), got {device!r}"
            ) from None

    def bisection_bandwidth_bytes_per_s(self) -> float:
        """What the first half of the devices can send to the second at once, in one direction.

        Whole nodes (or NVLink domains) where there are several; only links that routes between the halves
        use.
        """
        return self._wiring.bisection_bandwidth_bytes_per_s()

    def to_toml(self) -> str:
        """The cluster as a file that `load_cluster` reads, with every key explained."""
        if self.spec is None:
            raise UsageError(f"{self.name} was imported as a graph and has no TOML form: use --node-link or --graphml")
        from distsim.cluster.files.to_toml import to_toml

        return to_toml(self.spec)


def _nodes(number: int) -> str:
    return f"{number} node{'' if number == 1 else 's'}"
