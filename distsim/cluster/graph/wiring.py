"""Connects equal hosts by a fabric, or any graph, and computes bisection bandwidths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from distsim.cluster.graph.cluster import Cluster, Places, Rows, Wires, one_by_one, routes
from distsim.cluster.graph.fabrics import Fabric, RailFabric, mix
from distsim.cluster.graph.host_template import HostTemplate
from distsim.cluster.graph.link import CpuModel, Link, Links, NcclFacts, NodeModel, Vertex
from distsim.errors import UsageError

if TYPE_CHECKING:
    import networkx

# -- Many equal hosts on a fabric: the wiring of every cluster that a file describes.
#
# Everything has a computed place: host h's links are a block of the same size, a fabric's cables follow, so a
# route is put together from the host's own paths and the fabric's, in a few microseconds, on any number of
# hosts.


class HostsOnFabric:
    """*num_hosts* copies of *template*, with their NICs on *fabric* and their NVLink ports on one NVSwitch per
    *domain* hosts.
    """

    def __init__(
        self,
        template: HostTemplate,
        num_hosts: int,
        fabric: Fabric | None,
        *,
        nic_bytes_per_s: float = 0.0,
        nic_latency_s: float = 0.0,
        domain: int = 1,
    ) -> None:
        self.template, self.num_hosts, self.fabric, self.domain = template, num_hosts, fabric, domain
        self.nic_bytes_per_s = nic_bytes_per_s
        self.per_host = len(template.devices)
        self._nic_latency_s = nic_latency_s / 2
        num_wires = len(template.wires)
        self._port_base = num_wires
        self.nic_base = num_wires + (2 * self.per_host if template.port else 0)
        self.block = self.nic_base + (2 * len(template.nics) if fabric else 0)
        self._cable_base = self.block * num_hosts

    @cached_property
    def devices(self) -> list[str]:
        """Return the devices in rank order."""
        return [f"n{host}/{device}" for host in range(self.num_hosts) for device in self.template.devices]

    @cached_property
    def vertices(self) -> list[Vertex]:
        """Return the vertices: first those of the hosts, then the shared ones such as switches."""
        template = self.template
        result = [
            Vertex(f"n{host}/{part.name}", part.kind, host, part.local)
            for host in range(self.num_hosts)
            for part in template.parts
        ]
        if template.port is not None:
            domains = -(-self.num_hosts // self.domain)
            result.extend(Vertex(f"nvswitch{i}", "nvswitch", None, i) for i in range(domains))
        if self.fabric is not None:
            result.extend(Vertex(name, kind, None, i) for i, (name, kind) in enumerate(self.fabric.switches))
        return result

    @cached_property
    def links(self) -> Links:
        """Return the links: a block for each host (inner links, NVLink ports, both directions of its NICs), then the
        fabric's cables.
        """
        template, fabric = self.template, self.fabric
        block = [(wire.bandwidth_bytes_per_s, wire.latency_s, wire.kind) for wire in template.wires]
        if template.port is not None:
            block += [(*template.port, "nvlink")] * (2 * self.per_host)
        cables: NDArray[np.float64] = np.zeros(0)
        hop_s = 0.0
        if fabric is not None:
            cables, hop_s = fabric.cables.bandwidth_bytes_per_s, fabric.switch_latency_s
            out = (self.nic_bytes_per_s, self._nic_latency_s, "nic")
            block += [out, (self.nic_bytes_per_s, self._nic_latency_s + hop_s, "nic")] * len(template.nics)
        kinds = [*dict.fromkeys(kind for _, _, kind in block), "fabric"]
        codes = np.array([kinds.index(kind) for _, _, kind in block], dtype=np.uint8)
        figures = np.array([figures[:2] for figures in block], dtype=np.float64).reshape(len(block), 2).T
        return Links(
            np.concatenate([np.tile(figures[0], self.num_hosts), cables]),
            np.concatenate([np.tile(figures[1], self.num_hosts), np.full(len(cables), hop_s)]),
            np.concatenate([np.tile(codes, self.num_hosts), np.full(len(cables), len(kinds) - 1, dtype=np.uint8)]),
            kinds,
            self._ends,
        )

    def _ends(self, index: int) -> tuple[str, str]:
        """Return the names of the two ends of link *index*."""
        template, fabric = self.template, self.fabric
        host, i = divmod(index, self.block)
        if host >= self.num_hosts:
            assert fabric is not None
            cable = index - self._cable_base
            return fabric.switches[fabric.cables.src[cable]][0], fabric.switches[fabric.cables.dst[cable]][0]
        if i < self._port_base:
            wire = template.wires[i]
            return f"n{host}/{wire.src}", f"n{host}/{wire.dst}"
        if i < self.nic_base:
            port, down = divmod(i - self._port_base, 2)
            own, switch = f"n{host}/{template.devices[port]}", f"nvswitch{host // self.domain}"
        else:
            assert fabric is not None
            nic, down = divmod(i - self.nic_base, 2)
            own, switch = f"n{host}/{template.nics[nic]}", fabric.switches[fabric.attach(host, nic)][0]
        return (switch, own) if down else (own, switch)

    @cached_property
    def _own_nics(self) -> list[tuple[int, ...]]:
        return self.template.own_nics

    def route(self, src: int, dst: int, flow_key: int, rail: int | None, enter: int | None = None) -> tuple[int, ...]:
        """Return the route inside the host, through a shared NVSwitch, or out by NIC *rail*, over the fabric, and in
        by NIC *enter*.
        """
        host, i = divmod(src, self.per_host)
        other, j = divmod(dst, self.per_host)
        base, other_base = host * self.block, other * self.block
        template = self.template
        if template.port is not None and host // self.domain == other // self.domain:
            if src == dst:
                return ()
            return base + self._port_base + 2 * i, other_base + self._port_base + 2 * j + 1
        if host == other:
            inside = template.between_devices[i][j]
            if inside is None:
                raise UsageError(f"nothing connects {self.devices[src]} and {self.devices[dst]}")
            return tuple([base + index for index in inside])
        if self.fabric is None or not template.nics:
            raise UsageError(f"nothing connects {self.devices[src]} and {self.devices[dst]}: the nodes have no NIC")
        flow = mix(src, dst, flow_key)
        k, m = self.nic(i, flow, rail), self.nic(j, flow, rail if enter is None else enter)
        fabric = self.fabric
        if isinstance(fabric, RailFabric) and k != m:
            k, out = m, self._pxn_path(i, m)
        else:
            out = template.to_nic[i][k]
        back = template.from_nic[m][j]
        if out is None or back is None:
            raise UsageError(f"nothing connects {self.devices[src]} to NIC {k} of its node")
        cables = fabric.path(fabric.attach(host, k), fabric.attach(other, m), flow >> 16)
        return (
            *[base + index for index in out],
            base + self.nic_base + 2 * k,
            *[self._cable_base + index for index in cables],
            other_base + self.nic_base + 2 * m + 1,
            *[other_base + index for index in back],
        )

    def _pxn_path(self, device: int, nic: int) -> tuple[int, ...] | None:
        """Return the links inside a host from *device* to *nic* through the device that *nic* belongs to (PXN)."""
        template = self.template
        peer = next((k for k, nics in enumerate(self._own_nics) if nic in nics), device)
        if peer == device:
            return template.to_nic[device][nic]
        if template.port is not None:
            between: tuple[int, ...] | None = (self._port_base + 2 * device, self._port_base + 2 * peer + 1)
        else:
            between = template.between_devices[device][peer]
        out = template.to_nic[peer][nic]
        return None if between is None or out is None else (*between, *out)

    def routes(self, src: Places, dst: Places, flow_key: int, rails: Places, enters: Places | None = None) -> Rows:
        """Return `route` of many pairs, one row each, padded with -1.

        *rails* are the NICs by which the data leave (-1: any); *enters* are those by which they arrive, if different.
        """
        enters = rails if enters is None else enters
        if isinstance(self.fabric, RailFabric):
            return one_by_one(self.route, src, dst, flow_key, rails, enters)
        wires, template = self._wires, self.template
        host, other = src // self.per_host, dst // self.per_host
        i, j = src - host * self.per_host, dst - other * self.per_host
        close = host == other
        inside = np.where(wires.between[i, j] < 0, -1, wires.between[i, j] + (host * self.block)[:, None])
        lost = close & wires.apart[i, j]
        if template.port is not None:
            close, lost = host // self.domain == other // self.domain, np.zeros(len(src), dtype=bool)
            up = host * self.block + self._port_base + 2 * i
            down = other * self.block + self._port_base + 2 * j + 1
            inside = np.where((src == dst)[:, None], -1, np.stack([up, down], axis=1))
        away = ~close
        outside = None
        if away.any() and self.fabric is not None and template.nics:
            outside = routes(
                wires,
                self.fabric,
                src[away],
                dst[away],
                flow_key,
                rails[away],
                enters[away],
                block=self.block,
                nic_base=self.nic_base,
                cable_base=self._cable_base,
            )
        if lost.any() or (away.any() and outside is None):  # one of them has no way: say which
            return one_by_one(self.route, src, dst, flow_key, rails, enters)
        if outside is None:
            return inside
        rows = np.full((len(src), max(inside.shape[1], outside.shape[1])), -1, dtype=np.int64)
        rows[close, : inside.shape[1]] = inside[close]
        rows[away, : outside.shape[1]] = outside
        return rows

    @cached_property
    def _wires(self) -> Wires:
        return Wires(self.template)

    def nic(self, device: int, flow: int, rail: int | None) -> int:
        """Return the NIC by which *flow* leaves or reaches *device*: *rail*, or one of the device's own."""
        if rail is not None:
            if not 0 <= rail < len(self.template.nics):
                raise UsageError(f"expected a rail from 0 to {len(self.template.nics) - 1}, got {rail}")
            return rail
        own = self._own_nics[device]
        if not own:
            raise UsageError(f"nothing connects {self.template.devices[device]} to a NIC of its node")
        return own[flow % len(own)]

    def bisection_bandwidth_bytes_per_s(self) -> float:
        """Return the bisection bandwidth in bytes/s (`bisect_hosts`)."""

        return bisect_hosts(self)


# -- A cluster that is any graph: imported ones, where no structure is known and routes are shortest paths.

USUAL = "dgx-h100"
"""Preset that supplies the properties which an imported graph does not have."""

# A route is the quickest for a transfer of this size, in whole picoseconds so that equal ways compare equal.
_TYPICAL_BYTES = 1 << 20

MAX_GRAPH_LINKS = 200_000
"""Maximum number of links of an imported graph."""
_MAX_VISITS = 12_000_000
"""Maximum number of nodes and links that the searches for shortest paths in an imported graph visit, which take about
a microsecond each.
"""
_MAX_FLOW_LINKS = 20_000
"""Like `MAX_LINKS`, in a graph of any shape, which may be the worst one for the algorithm."""


class GraphWiring:
    """Vertices and links of an arbitrary graph, which has no rails: *rail* is ignored."""

    def __init__(self, vertices: Sequence[Vertex], links: Sequence[Link]) -> None:
        self.vertices = vertices
        self.links = Links.of(links)
        gpus = [vertex.name for vertex in vertices if vertex.kind == "gpu"]
        self.devices = gpus or [vertex.name for vertex in vertices if vertex.kind == "cpu"]
        self._trees: dict[int, dict[str, list[str]]] = {}

    @cached_property
    def _index(self) -> dict[tuple[str, str], int]:
        return {(link.src, link.dst): link.index for link in self.links}

    @cached_property
    def _graph(self) -> networkx.DiGraph[str]:
        import networkx

        graph: networkx.DiGraph[str] = networkx.DiGraph()
        for link in self.links:
            time_s = link.latency_s + _TYPICAL_BYTES / link.bandwidth_bytes_per_s
            graph.add_edge(link.src, link.dst, weight=round(time_s * 1e12))
        return graph

    def _check_work(self, sources: set[int]) -> None:
        """Raise UsageError if the searches for shortest paths from *sources* take too long."""
        searches, size = len(sources), len(self.vertices) + len(self.links)
        if searches * size > _MAX_VISITS:
            raise UsageError(
                f"expected a graph of at most {_MAX_VISITS // searches:,} nodes and links for routes from "
                f"{searches:,} devices, got {size:,}; describe the cluster as TOML (distsim topo show NAME --toml "
                "prints one), whose fabric gives the routes"
            )

    def _before(self, src: int) -> dict[str, list[str]]:
        """Return for each vertex its predecessors on shortest paths from device *src*."""
        if src not in self._trees:
            import networkx

            self._check_work({*self._trees, src})
            source = self.devices[src]
            before: dict[str, list[str]] = {}
            if source in self._graph:
                before, _ = networkx.dijkstra_predecessor_and_distance(self._graph, source)
            self._trees[src] = {name: sorted(set(names)) for name, names in before.items()}
        return self._trees[src]

    def route(self, src: int, dst: int, flow_key: int, rail: int | None, enter: int | None = None) -> tuple[int, ...]:
        """Return a fastest route; at each fork a hash of the flow chooses among equal ones."""
        loop = self._index.get((self.devices[src], self.devices[src]))
        if src == dst:
            return () if loop is None else (loop,)
        before = self._before(src)
        here = self.devices[dst]
        if here not in before:
            raise UsageError(f"nothing connects {self.devices[src]} and {here}")
        backwards: list[int] = []
        while here != self.devices[src]:
            choice = before[here]
            fork = 0 if len(choice) == 1 else mix(src, dst, flow_key, len(backwards)) % len(choice)
            backwards.append(self._index[choice[fork], here])
            here = choice[fork]
        return tuple(reversed(backwards))

    def routes(self, src: Places, dst: Places, flow_key: int, rails: Places, enters: Places | None = None) -> Rows:
        """Return the routes of many pairs, computed one by one."""
        self._check_work({*self._trees, *src.tolist()})
        return one_by_one(self.route, src, dst, flow_key, rails, rails)

    def bisection_bandwidth_bytes_per_s(self) -> float:
        """Compute the bisection bandwidth as a maximum flow over the whole graph."""

        half = len(self.devices) // 2
        if half == 0:
            return 0.0
        flows = [(link.src, link.dst, link.bandwidth_bytes_per_s) for link in self.links if link.src != link.dst]
        return max_flow(flows, self.devices[:half], self.devices[half:], _MAX_FLOW_LINKS)


def graph_cluster(
    name: str,
    vertices: Sequence[Vertex],
    links: Sequence[Link],
    where: str,
    usual: Callable[[], Cluster],
    facts: tuple[CpuModel, NodeModel, NcclFacts] | None = None,
) -> Cluster:
    """Build a cluster from vertices and links. Without *facts*, missing properties are those of the *usual* cluster."""
    wiring = GraphWiring(vertices, links)
    if not wiring.devices:
        raise UsageError(f"{where}: expected nodes of kind 'gpu' or 'cpu' to place ranks on, got none")
    host_of = {vertex.name: vertex.host for vertex in vertices}
    per_host: dict[int | None, int] = {}
    for device in wiring.devices:
        per_host[host_of[device]] = per_host.get(host_of[device], 0) + 1
    if None in per_host:
        lone = next(device for device in wiring.devices if host_of[device] is None)
        raise UsageError(f"{where}: expected a host number for every device, got none for {lone}")
    sizes = sorted(set(per_host.values()))
    if len(sizes) > 1:
        raise UsageError(f"{where}: expected the same number of devices on every host, got {sizes[0]} to {sizes[-1]}")
    described = f"imported from {where}" + ("" if facts else f"; values that it does not give are those of {USUAL}")
    order = {device: position for position, device in enumerate(wiring.devices)}
    wiring.devices.sort(key=lambda device: (host_of[device] or 0, order[device]))
    return Cluster(
        name,
        len(per_host),
        wiring,
        *(facts or _guess(wiring, sizes[0], usual())),
        description=described,
    )


def _guess(wiring: GraphWiring, per_host: int, usual: Cluster) -> tuple[CpuModel, NodeModel, NcclFacts]:
    gpu = next((vertex for vertex in wiring.vertices if vertex.kind == "gpu"), None)
    first = wiring.devices[0]
    nvlinks = [link for link in wiring.links if link.src == first and link.kind == "nvlink"]
    switched = any(vertex.kind == "nvswitch" for vertex in wiring.vertices)
    host = next(vertex.host for vertex in wiring.vertices if vertex.name == first)
    nics = [vertex.name for vertex in wiring.vertices if vertex.kind == "nic" and vertex.host == host]
    rates = [link.bandwidth_bytes_per_s for link in wiring.links if nics and link.src == nics[0] and link.kind == "nic"]
    delays = [2 * link.latency_s for link in wiring.links if nics and link.src == nics[0] and link.kind == "nic"]
    total = sum(link.bandwidth_bytes_per_s for link in nvlinks)
    node = replace(
        usual.node,
        num_gpus=per_host if gpu else 0,
        gpu_model=usual.node.gpu_model if gpu else "",
        gpu=usual.node.gpu if gpu else None,
        ranks_per_node=per_host,
        nvlink="none" if not nvlinks else "nvswitch" if switched else "mesh",
        nvlinks_per_gpu=len(nvlinks),
        nvlink_bytes_per_s=total,
        nvlink_spec_bytes_per_s=total,
        nvlink_pair_bytes_per_s=nvlinks[0].bandwidth_bytes_per_s if nvlinks else 0.0,
        nvlink_latency_s=nvlinks[0].latency_s if nvlinks else 0.0,
        nvls=False,
        num_nics=len(nics),
        nic_bytes_per_s=max(rates, default=0.0),
        nic_spec_bytes_per_s=max(rates, default=0.0),
        nic_latency_s=max(delays, default=0.0),
        gpu_direct_rdma=bool(gpu and nics),
    )
    nccl = replace(
        usual.nccl,
        compute_capability=usual.nccl.compute_capability if gpu else 0,
        net=("ib" if gpu else "tcp") if nics else "none",
        num_nics=node.num_nics,
        nic_bytes_per_s=node.nic_bytes_per_s,
        nic_latency_s=node.nic_latency_s,
    )
    return usual.cpu.share(per_host), node, nccl


# -- Bisection bandwidth: the largest flow from the first half of the devices to the second, in one direction.
#
# Where there are several hosts the halves are whole hosts, and whole NVLink domains where hosts share them.
# Only the network that routes between the halves use counts: NVLink inside an NVLink domain, otherwise NICs and
# fabric; that a host could also send through PCIe what its NVLinks cannot carry is left out, as no route does.

MAX_LINKS = 60_000
"""Maximum number of links (after hosts are folded into their NICs) for which a maximum flow is fast enough to compute.
"""


class EqualHosts(Protocol):
    """Hosts from one template on a fabric; *domain* of them share an NVLink domain."""

    num_hosts: int
    domain: int
    template: HostTemplate
    fabric: Fabric | None
    nic_bytes_per_s: float

    @property
    def devices(self) -> Sequence[str]:
        """Return the devices in rank order."""

    @property
    def links(self) -> Links:
        """Return links by index."""


def max_flow(
    links: Iterable[tuple[str, str, float]], sources: Sequence[str], sinks: Sequence[str], most: int = MAX_LINKS
) -> float:
    """Return the maximum flow from all *sources* to all *sinks* over directed *links* (from, to, bytes/s).

    Raises:
        UsageError: There are more than *most* links.
    """
    import networkx

    graph: networkx.DiGraph[str] = networkx.DiGraph()
    for src, dst, bandwidth in links:
        if graph.has_edge(src, dst):
            graph[src][dst]["capacity"] += round(bandwidth)
        else:
            graph.add_edge(src, dst, capacity=round(bandwidth))
    if graph.number_of_edges() > most:
        raise UsageError(f"bisection bandwidth is computed up to {most} links, got {graph.number_of_edges()}")
    for name in sources:
        graph.add_edge("<source>", name)
    for name in sinks:
        graph.add_edge(name, "<sink>")
    return float(networkx.maximum_flow_value(graph, "<source>", "<sink>"))


def bisect_hosts(wiring: EqualHosts) -> float:
    """Return the bisection bandwidth of equal hosts on a fabric; each host counts as what it can send through each
    NIC.
    """
    if wiring.num_hosts == 1 or (wiring.template.port is not None and wiring.num_hosts <= wiring.domain):
        return _within_domain(wiring)
    template, fabric = wiring.template, wiring.fabric
    if fabric is None:
        return 0.0
    egress = max_flow(
        [(w.src, w.dst, w.bandwidth_bytes_per_s) for w in template.wires if w.kind != "loopback"]
        + [(nic, f"{nic}/port", wiring.nic_bytes_per_s) for nic in template.nics],
        list(template.devices),
        [f"{nic}/port" for nic in template.nics],
    )
    per_nic = egress / len(template.nics)
    names = [name for name, _ in fabric.switches]
    cables = fabric.cables
    ends = zip(cables.src.tolist(), cables.dst.tolist(), cables.bandwidth_bytes_per_s.tolist(), strict=True)
    links = [(names[src], names[dst], rate) for src, dst, rate in ends]
    half = wiring.num_hosts // 2
    if template.port is not None:
        half = -(-wiring.num_hosts // wiring.domain) // 2 * wiring.domain
    for host in range(wiring.num_hosts):
        for k in range(len(template.nics)):
            leaf = names[fabric.attach(host, k)]
            links.append(("<a>", leaf, per_nic) if host < half else (leaf, "<b>", per_nic))
    return max_flow(links, ["<a>"], ["<b>"])


def _within_domain(wiring: EqualHosts) -> float:
    kinds = {link.kind for link in wiring.links}
    usable: list[Link] = [
        link
        for link in wiring.links
        if link.kind == "nvlink" or ("nvlink" not in kinds and link.kind in ("pcie", "socket", "c2c"))
    ]
    half = len(wiring.devices) // 2
    if half == 0:
        return 0.0
    flows = [(link.src, link.dst, link.bandwidth_bytes_per_s) for link in usable]
    return max_flow(flows, wiring.devices[:half], wiring.devices[half:])
