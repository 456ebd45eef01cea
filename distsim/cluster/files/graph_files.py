"""Reads graphs of other tools: ASTRA-sim's network files, networkx node-link JSON, GraphML."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from distsim.cluster.graph.cluster import Cluster
from distsim.cluster.graph.link import CpuModel, Link, NcclFacts, NodeModel, Vertex
from distsim.cluster.graph.wiring import MAX_GRAPH_LINKS, graph_cluster
from distsim.errors import UsageError
from distsim.text.file_tables import Bandwidth, FileTable, Time, complaints, in_our_words
from distsim.text.untrusted_input import brief, faulty, load_json, printable

# -- ASTRA-sim's analytical network files: a few dimensions, each a ring, a full mesh or a switch.
#
# topology: [ Ring, Switch ] npus_count: [ 4, 8 ] bandwidth: [ 50.0, 25.0 ]   # GB/s latency: [ 500.0, 500.0 ]
# # ns
#
# That is all of YAML such files use, so no YAML library is needed to read them. Bandwidth is per link and in
# units of 1e9 bytes (releases of ASTRA-sim before the change to SI units reckoned 2^30). NPUs that differ in
# the first dimension only are one host.

_MAX_NPUS = 65_536
_LINE_RE = re.compile(r"([A-Za-z_][\w-]*)\s*:\s*(.*)")


class _AstraFile(FileTable):
    """The keys of such a file that count here, a value for each dimension."""

    model_config = ConfigDict(extra="ignore")
    topology: list[Literal["Ring", "FullyConnected", "Switch"]]
    npus_count: list[Annotated[int, Field(ge=1)]]
    bandwidth: list[Annotated[float, Field(gt=0)]]
    latency: list[Annotated[float, Field(ge=0)]]


def from_astra(text: str, where: str, usual: Callable[[], Cluster]) -> Cluster:
    """Build a cluster from an ASTRA-sim network file, or raise one UsageError with every fault. See `graph_cluster`
    for *usual*.
    """
    try:
        astra = _AstraFile.model_validate(_read(text, where))
    except ValidationError as error:
        raise faulty(f"{where}: not an ASTRA-sim network file", complaints(error, _AstraFile)) from None
    sizes = {name: len(values) for name, values in astra}
    faults, total = list[str](), math.prod(astra.npus_count)
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        faults.append(f"expected as many values in each list as there are dimensions, got {listed}")
    if total > _MAX_NPUS:
        faults.append(f"npus_count: expected at most {_MAX_NPUS} NPUs in all, got {total}")
    shapes = zip(astra.topology, astra.npus_count, strict=False)
    num_links = total * sum(count - 1 if name == "FullyConnected" else 2 for name, count in shapes)
    if num_links > MAX_GRAPH_LINKS:
        faults.append(f"expected at most {MAX_GRAPH_LINKS} links, got {num_links}")
    if faults:
        raise faulty(f"{where}: not an ASTRA-sim network file", faults)
    return _build(astra, where, usual)


def _build(astra: _AstraFile, where: str, usual: Callable[[], Cluster]) -> Cluster:
    total, per_host = math.prod(astra.npus_count), astra.npus_count[0]
    names = [f"n{i // per_host}/gpu{i % per_host}" for i in range(total)]
    vertices = [Vertex(name, "gpu", i // per_host, i % per_host) for i, name in enumerate(names)]
    links: list[Link] = []
    stride = 1
    for axis, (topology, count) in enumerate(zip(astra.topology, astra.npus_count, strict=True)):
        kind = "nvlink" if axis == 0 else "fabric"
        bandwidth, latency = astra.bandwidth[axis] * 1e9, astra.latency[axis] * 1e-9
        for first in (i for i in range(total) if i // stride % count == 0):
            group = [names[first + k * stride] for k in range(count)]
            if topology == "Switch":
                hub = f"n{first // per_host}/nvswitch0" if axis == 0 else f"dim{axis}/switch{first}"
                host = first // per_host if axis == 0 else None
                vertices.append(Vertex(hub, "nvswitch" if axis == 0 else "switch", host, 0))
                pairs = [(member, hub) for member in group]
            elif topology == "Ring":
                pairs = [(group[k], group[(k + 1) % count]) for k in range(count if count > 2 else count - 1)]
            else:
                pairs = [(a, b) for k, a in enumerate(group) for b in group[k + 1 :]]
            for a, b in pairs:
                for src, dst in ((a, b), (b, a)):
                    links.append(Link(len(links), src, dst, bandwidth, latency, kind))
        stride *= count
    return graph_cluster(Path(where).stem, vertices, links, where, usual)


def _read(text: str, where: str) -> dict[str, list[str]]:
    """Parse keys with flow lists (`[a, b]`), block lists (`- a`) or single values."""
    table: dict[str, list[str]] = {}
    current: list[str] | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line or line in ("---", "..."):
            continue
        if line.startswith("- ") and current is not None:
            current.append(_unquoted(line[2:]))
            continue
        match = _LINE_RE.fullmatch(line)
        if match is None:
            raise UsageError(f"{where}: line {number}: expected 'key: [value, ...]', got {brief(line[:60])!r}")
        key, value = match.groups()
        if value.startswith("[") and not value.endswith("]"):
            raise UsageError(f"{where}: line {number}: a list without its closing ']' (cut off?)")
        items = value.removeprefix("[").removesuffix("]").split(",") if value else []
        current = table[key] = [_unquoted(item) for item in items if item.strip()]
    return table


def _unquoted(text: str) -> str:
    return text.strip().strip("\"'")


# -- networkx node-link JSON, in and out, and GraphML, out.
#
# Nodes: `id`, `kind` (gpu, cpu, nvswitch, pcie, nic, leaf, spine, switch), `host` (for what is inside one).
# Edges (key `edges`, or `links` as networkx wrote before 3.4): `source`, `target`, `bandwidth_bytes_per_s` or
# `bandwidth` ("400Gbps"), `latency_s` or `latency` ("1us"), `kind`. An undirected graph has a link each way for
# every edge.


def _as_name(value: Any) -> str:
    """Return a node's id as networkx writes it: a list or an object cannot be one."""
    if not isinstance(value, str | int) or (isinstance(value, int) and abs(value) >= 1 << 200):
        raise UsageError(f"expected a name or a number, got {brief(value)}")
    return printable(str(value)[:200])


_Id = Annotated[str, BeforeValidator(in_our_words(_as_name))]


class _Node(FileTable):
    model_config = ConfigDict(extra="ignore")
    id: _Id
    kind: Literal["gpu", "cpu", "nvswitch", "pcie", "nic", "leaf", "spine", "switch"] = "switch"
    host: Annotated[int, Field(ge=0, strict=True)] | None = None


class _Edge(FileTable):
    model_config = ConfigDict(extra="ignore")
    source: _Id
    target: _Id
    bandwidth: Bandwidth = Field(validation_alias=AliasChoices("bandwidth_bytes_per_s", "bandwidth"))
    latency: Time = Field(0.0, validation_alias=AliasChoices("latency_s", "latency"))
    kind: _Id = "fabric"


class _Graph(FileTable):
    model_config = ConfigDict(extra="ignore")
    nodes: Annotated[list[_Node], Field(max_length=MAX_GRAPH_LINKS)]
    edges: Annotated[list[_Edge], Field(max_length=MAX_GRAPH_LINKS, validation_alias=AliasChoices("edges", "links"))]
    directed: Any = True
    graph: Any = None


def to_node_link(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster as networkx's node-link data (key `edges`), with its other properties under `graph`."""
    facts = {"cpu": asdict(cluster.cpu), "node": asdict(cluster.node), "nccl": asdict(cluster.nccl)}
    return {
        "directed": True,
        "multigraph": False,
        "graph": {"name": cluster.name, "distsim": facts},
        "nodes": [{"id": v.name, "kind": v.kind, "host": v.host, "local": v.local} for v in cluster.vertices],
        "edges": [
            {
                "source": link.src,
                "target": link.dst,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
                "latency_s": link.latency_s,
                "kind": link.kind,
            }
            for link in cluster.links
        ],
    }


def to_graphml(cluster: Cluster, path: str | Path) -> None:
    """Write the cluster as GraphML, in which the *host* of shared parts is -1 because GraphML has no None."""
    import networkx

    graph = cluster.graph.copy()
    for _, attributes in graph.nodes(data=True):
        attributes["host"] = -1 if attributes["host"] is None else attributes["host"]
    networkx.write_graphml(graph, path)


def from_node_link(text: str, where: str, usual: Callable[[], Cluster]) -> Cluster:
    """Build a cluster from node-link JSON, or raise one UsageError with all faults. See `graph_cluster` for *usual*."""
    try:
        data = load_json(text)
    except ValueError as error:
        raise UsageError(f"{where}: not valid JSON (cut off?): {brief(str(error), 300)}") from None
    if not isinstance(data, dict) or not isinstance(data.get("nodes"), list):
        raise UsageError(f"{where}: expected node-link JSON with a list 'nodes', got {brief(data)}")
    try:
        read = _Graph.model_validate(data)
    except ValidationError as error:
        raise faulty(where, complaints(error, _Graph)) from None
    if faults := list(_unconnected(read)):
        raise faulty(where, faults)
    locals_: Counter[tuple[str, int | None]] = Counter()
    vertices: list[Vertex] = []
    for node in read.nodes:
        vertices.append(Vertex(node.id, node.kind, node.host, locals_[node.kind, node.host]))
        locals_[node.kind, node.host] += 1
    links: list[Link] = []
    for edge in read.edges:
        for src, dst in _ways(read, edge):
            links.append(Link(len(links), src, dst, edge.bandwidth, edge.latency, edge.kind))
    graph = read.graph if isinstance(read.graph, dict) else {}
    name = printable(str(graph.get("name") or "")[:200]) or Path(where).stem
    return graph_cluster(name, vertices, links, where, usual, _facts(graph.get("distsim"), where))


def _ways(graph: _Graph, edge: _Edge) -> list[tuple[str, str]]:
    """Return the directions of an edge: both where the graph is undirected."""
    there = edge.source, edge.target
    return [there, there[::-1]] if graph.directed is False and edge.source != edge.target else [there]


def _unconnected(graph: _Graph) -> Iterator[str]:
    """Yield what does not fit together: nodes and edges that are there twice, and ends that are no node."""
    nodes: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        if nodes.setdefault(node.id, position) != position:
            yield f"nodes[{position}].id: {brief(node.id, 60)!r} is already nodes[{nodes[node.id]}]"
    edges: dict[tuple[str, str], int] = {}
    for position, edge in enumerate(graph.edges):
        for end in ("source", "target"):
            if getattr(edge, end) not in nodes:
                yield f"edges[{position}].{end}: expected the id of a node, got {brief(getattr(edge, end), 60)!r}"
        for src, dst in _ways(graph, edge):
            if edges.setdefault((src, dst), position) != position:
                both = f"{brief(src, 60)}->{brief(dst, 60)}"
                yield f"edges[{position}]: {both} is already edges[{edges[src, dst]}]; give one edge with the sum"


@dataclass(frozen=True)
class _Facts:
    """The properties that `to_node_link` writes."""

    cpu: CpuModel
    node: NodeModel
    nccl: NcclFacts


def _facts(data: Any, where: str) -> tuple[CpuModel, NodeModel, NcclFacts] | None:
    """Return the properties that `to_node_link` wrote; None if the file has none, or those of another version."""
    try:
        facts = TypeAdapter(_Facts).validate_python(data)
    except ValidationError as error:
        if any(detail["type"] in ("missing", "dataclass_type") for detail in error.errors()):
            return None
        raise faulty(where, complaints(error, _Facts, "graph.distsim")) from None
    node, nccl = facts.node, facts.nccl
    needed = []
    if node.nvlink != "none":
        needed += ["node.nvlink_bytes_per_s", "node.nvlink_spec_bytes_per_s", "node.nvlink_pair_bytes_per_s"]
        needed += ["node.nvlinks_per_gpu"]
    if node.num_nics or nccl.num_nics or nccl.net != "none":
        needed += ["node.num_nics", "node.nic_bytes_per_s", "node.nic_spec_bytes_per_s"]
        needed += ["nccl.num_nics", "nccl.nic_bytes_per_s"]
    faults = [
        f"graph.distsim.{name}: expected a number above zero, got 0" for name in needed if not attrgetter(name)(facts)
    ]
    if node.nvls and node.nvlink != "nvswitch":
        faults.append(f"graph.distsim.node.nvls: expected false without an NVSwitch (nvlink is {node.nvlink})")
    if faults:
        raise faulty(where, faults)
    return facts.cpu, node, nccl
