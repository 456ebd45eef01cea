"""A cluster that is any graph: imported ones, where no structure is known and routes are shortest paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from distsim.cluster.graph.cluster import Cluster
from distsim.cluster.graph.facts import CpuModel, NcclFacts, NodeModel
from distsim.cluster.graph.link import Link, Links, Vertex
from distsim.cluster.graph.many_routes import Places, Rows, one_by_one
from distsim.cluster.graph.tree_fabric import mix
from distsim.errors import UsageError

__all__ = ["USUAL", "GraphWiring", "graph_cluster"]

USUAL = "dgx-h100"
"""The preset that says what an imported graph does not."""

# A route is the quickest for a transfer of this size, in whole picoseconds so that equal ways compare equal.
_TYPICAL_BYTES = 1 << 20


class GraphWiring:
    """Vertices and links as given. *rail* is not known here and is ignored."""

    def __init__(self, vertices: Sequence[Vertex], links: Sequence[Link]) -> None:
        self.vertices = vertices
        self.links = Links.of(links)
        gpus = [vertex.name for vertex in vertices if vertex.kind == "gpu"]
        self.devices = gpus or [vertex.name for vertex in vertices if vertex.kind == "cpu"]
        self._trees: dict[int, dict[str, list[str]]] = {}

    @cached_property
    def _index(self) -> dict[tuple[str, str], int]:
        return {(link.src, link.dst): link.index for link in self.links}

    def _before(self, src: int) -> dict[str, list[str]]:
        """For every vertex, the ones that come just before it on a quickest way from the device at *src*."""
        if src not in self._trees:
            import networkx

            graph: networkx.DiGraph[str] = networkx.DiGraph()
            for link in self.links:
                time_s = link.latency_s + _TYPICAL_BYTES / link.bandwidth_bytes_per_s
                graph.add_edge(link.src, link.dst, weight=round(time_s * 1e12))
            source = self.devices[src]
            before: dict[str, list[str]] = {}
            if source in graph:
                before, _ = networkx.dijkstra_predecessor_and_distance(graph, source)
            self._trees[src] = {name: sorted(set(names)) for name, names in before.items()}
        return self._trees[src]

    def route(self, src: int, dst: int, flow_key: int, rail: int | None, enter: int | None = None) -> tuple[int, ...]:
        """A quickest way; among equal ones a hash of the flow chooses at each fork."""
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
        """One after the other."""
        return one_by_one(self.route, src, dst, flow_key, rails, rails)

    def bisection_bandwidth_bytes_per_s(self) -> float:
        """By maximum flow over the whole graph."""
        from distsim.cluster.graph.bisection import max_flow

        half = len(self.devices) // 2
        if half == 0:
            return 0.0
        flows = [(link.src, link.dst, link.bandwidth_bytes_per_s) for link in self.links if link.src != link.dst]
        return max_flow(flows, self.devices[:half], self.devices[half:])


def graph_cluster(
    name: str,
    vertices: Sequence[Vertex],
    links: Sequence[Link],
    where: str,
    usual: Callable[[], Cluster],
    facts: tuple[CpuModel, NodeModel, NcclFacts] | None = None,
) -> Cluster:
    """A cluster from bare vertices and links; without *facts*, what no graph says is as on the *usual* cluster."""
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
    described = f"imported from {where}" + ("" if facts else f"; what it does not say is as on {USUAL}")
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
        num_nvswitches=int(switched),
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
