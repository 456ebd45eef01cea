"""Reads graphs of other tools: ASTRA-sim's network files, networkx node-link JSON, GraphML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from distsim.cluster.files.spec import NicSpec
from distsim.cluster.graph.cluster import Cluster
from distsim.cluster.graph.link import CpuModel, GpuModel, Link, NcclFacts, NodeModel, Vertex
from distsim.cluster.graph.wiring import graph_cluster
from distsim.errors import UsageError
from distsim.text.units import parse_bandwidth, parse_time
from distsim.text.untrusted_input import brief, folded, load_json, printable

__all__ = ["from_astra", "from_node_link", "to_graphml", "to_node_link"]

# -- ASTRA-sim's analytical network files: a few dimensions, each a ring, a full mesh or a switch.
#
# topology: [ Ring, Switch ] npus_count: [ 4, 8 ] bandwidth: [ 50.0, 25.0 ]   # GB/s latency: [ 500.0, 500.0 ]
# # ns
#
# That is all of YAML such files use, so no YAML library is needed to read them. Bandwidth is per link and in
# units of 1e9 bytes (releases of ASTRA-sim before the change to SI units reckoned 2^30). NPUs that differ in
# the first dimension only are one host.

_KEYS = ("topology", "npus_count", "bandwidth", "latency")
_TOPOLOGIES = ("Ring", "FullyConnected", "Switch")
_MAX_NPUS = 65_536
_LINE_RE = re.compile(r"([A-Za-z_][\w-]*)\s*:\s*(.*)")


def from_astra(text: str, where: str, usual: Callable[[], Cluster]) -> Cluster:
    """Build a cluster from an ASTRA-sim network file, or raise one UsageError with every fault. See `graph_cluster`
    for *usual*.
    """
    table = _read(text, where)
    faults = [f"{key}: expected a list, got nothing" for key in _KEYS if key not in table]
    sizes = {key: len(table[key]) for key in _KEYS if key in table}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{key} {size}" for key, size in sizes.items())
        faults.append(f"expected as many values in each list as there are dimensions, got {listed}")
    for position, name in enumerate(table.get("topology", [])):
        if name not in _TOPOLOGIES:
            faults.append(f"topology[{position}]: expected one of {', '.join(_TOPOLOGIES)}, got {brief(name)!r}")
    counts = _dimension_numbers(table.get("npus_count", []), "npus_count", 1, faults)
    bandwidths = _dimension_numbers(table.get("bandwidth", []), "bandwidth", 1e-9, faults)
    latencies = _dimension_numbers(table.get("latency", []), "latency", 0, faults)
    if any(count != int(count) for count in counts):
        faults.append(f"npus_count: expected whole numbers, got {counts}")
    if math.prod(counts) > _MAX_NPUS:
        faults.append(f"npus_count: expected at most {_MAX_NPUS} NPUs in all, got {math.prod(counts):.0f}")
    if faults:
        raise UsageError("\n".join([f"{where}: not an ASTRA-sim network file", *(f"  {f}" for f in folded(faults))]))
    return _build(
        table["topology"],
        [int(count) for count in counts],
        [value * 1e9 for value in bandwidths],
        [value * 1e-9 for value in latencies],
        where,
        usual,
    )


def _build(
    topologies: list[str],
    counts: list[int],
    bandwidths: list[float],
    latencies: list[float],
    where: str,
    usual: Callable[[], Cluster],
) -> Cluster:
    total, per_host = math.prod(counts), counts[0]
    names = [f"n{i // per_host}/gpu{i % per_host}" for i in range(total)]
    vertices = [Vertex(name, "gpu", i // per_host, i % per_host) for i, name in enumerate(names)]
    links: list[Link] = []
    stride = 1
    for axis, (topology, count) in enumerate(zip(topologies, counts, strict=True)):
        kind = "nvlink" if axis == 0 else "fabric"
        for first in _first_of_groups(total, stride, count):
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
                    links.append(Link(len(links), src, dst, bandwidths[axis], latencies[axis], kind))
        stride *= count
    return graph_cluster(Path(where).stem, vertices, links, where, usual)


def _first_of_groups(total: int, stride: int, count: int) -> Iterator[int]:
    return (i for i in range(total) if i // stride % count == 0)


def _dimension_numbers(values: list[str], key: str, least: float, faults: list[str]) -> list[float]:
    numbers: list[float] = []
    for position, value in enumerate(values):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (least <= number < math.inf):
            faults.append(f"{key}[{position}]: expected a number of at least {least:g}, got {brief(value)!r}")
            number = 1.0
        numbers.append(number)
    return numbers


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

_KINDS = ("gpu", "cpu", "nvswitch", "pcie", "nic", "leaf", "spine", "switch")
_NETS = ("none", *get_args(NicSpec.keys()["net"].annotation))
_MAX_FAULTS = 10


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


def to_graphml(cluster: Cluster, path: Path) -> None:
    """Write the cluster as GraphML, in which the *host* of shared parts is -1 because GraphML has no None."""
    import networkx

    graph = cluster.graph.copy()
    for _, attributes in graph.nodes(data=True):
        attributes["host"] = -1 if attributes["host"] is None else attributes["host"]
    try:
        networkx.write_graphml(graph, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def from_node_link(text: str, where: str, usual: Callable[[], Cluster]) -> Cluster:
    """Build a cluster from node-link JSON, or raise one UsageError with all faults. See `graph_cluster` for *usual*."""
    try:
        data = load_json(text)
    except ValueError as error:
        raise UsageError(f"{where}: not valid JSON (cut off?): {brief(str(error), 300)}") from None
    if not isinstance(data, dict) or not isinstance(data.get("nodes"), list):
        raise UsageError(f"{where}: expected node-link JSON with a list 'nodes', got {_brief(data)}")
    edges = data.get("edges", data.get("links"))
    if not isinstance(edges, list):
        raise UsageError(f"{where}: expected a list 'edges' (or 'links'), got {_brief(edges)}")
    faults: list[str] = []
    vertices = _vertices(data["nodes"], faults)
    both_ways = data.get("directed") is False
    links = _links(edges, {vertex.name for vertex in vertices}, both_ways, faults)
    if faults:
        more = [f"  and {len(faults) - _MAX_FAULTS} more"] if len(faults) > _MAX_FAULTS else []
        listed = [f"  {fault}" for fault in faults[:_MAX_FAULTS]]
        head = f"{where}: {len(faults)} fault{'s' if len(faults) > 1 else ''}"
        raise UsageError("\n".join([head, *listed, *more]))
    graph = data.get("graph")
    graph = graph if isinstance(graph, dict) else {}
    name = _name(graph.get("name")) or Path(where).stem
    return graph_cluster(name, vertices, links, where, usual, _facts(graph.get("distsim"), where))


def _vertices(nodes: list[Any], faults: list[str]) -> list[Vertex]:
    vertices: list[Vertex] = []
    seen: dict[str, int] = {}
    locals_: dict[tuple[str, int | None], int] = {}
    for position, node in enumerate(nodes):
        path = f"nodes[{position}]"
        if not isinstance(node, dict) or "id" not in node:
            faults.append(f"{path}: expected an object with an 'id', got {_brief(node)}")
            continue
        name, kind, host = _name(node["id"]), node.get("kind", "switch"), node.get("host")
        if name is None:
            faults.append(f"{path}.id: expected a name or a number, got {_brief(node['id'])}")
            continue
        if name in seen:
            faults.append(f"{path}.id: {_brief(name)!r} is already nodes[{seen[name]}]")
        seen[name] = position
        if not isinstance(kind, str) or kind not in _KINDS:
            faults.append(f"{path}.kind: expected one of {', '.join(_KINDS)}, got {_brief(kind)!r}")
        if host is not None and (isinstance(host, bool) or not isinstance(host, int) or host < 0):
            faults.append(f"{path}.host: expected a number of a host, got {_brief(host)}")
            host = None
        kind = kind if isinstance(kind, str) else brief(kind)
        local = locals_[kind, host] = locals_.get((kind, host), -1) + 1
        vertices.append(Vertex(name, kind, host, local))
    return vertices


def _links(edges: list[Any], names: set[str], both_ways: bool, faults: list[str]) -> list[Link]:
    links: list[Link] = []
    seen: dict[tuple[str, str], int] = {}
    for position, edge in enumerate(edges):
        path = f"edges[{position}]"
        if not isinstance(edge, dict):
            faults.append(f"{path}: expected an object, got {_brief(edge)}")
            continue
        ends = [_name(edge.get(end)) or "" for end in ("source", "target")]
        for end, name in zip(("source", "target"), ends, strict=True):
            if name not in names:
                faults.append(f"{path}.{end}: expected the id of a node, got {_brief(edge.get(end))!r}")
        bandwidth = _figure(edge, "bandwidth", "bandwidth_bytes_per_s", path, faults)
        latency = _figure(edge, "latency", "latency_s", path, faults)
        kind = _name(edge.get("kind", "fabric")) or "fabric"
        for src, dst in [ends, ends[::-1]] if both_ways and ends[0] != ends[1] else [ends]:
            if (src, dst) in seen:
                both = f"{_brief(src)}->{_brief(dst)}"
                faults.append(f"{path}: {both} is already edges[{seen[src, dst]}]; give one edge with the sum")
            seen[src, dst] = position
            links.append(Link(len(links), src, dst, bandwidth, latency, kind))
    return links


def _name(value: Any) -> str | None:
    """Return a node's id as networkx writes it; None for a list or an object, which cannot be an id."""
    if not isinstance(value, str | int) or (isinstance(value, int) and abs(value) >= 1 << 200):
        return None
    return printable(str(value)[:200])


def _figure(edge: Mapping[str, Any], key: str, exact: str, path: str, faults: list[str]) -> float:
    used = exact if exact in edge else key
    if used not in edge:
        if key == "bandwidth":
            faults.append(f"{path}: expected '{exact}' or '{key}', got neither")
        return 1.0 if key == "bandwidth" else 0.0
    try:
        return parse_bandwidth(edge[used]) if key == "bandwidth" else parse_time(edge[used])
    except UsageError as error:
        faults.append(f"{path}.{used}: {error}")
        return 1.0


def _facts(data: Any, where: str) -> tuple[CpuModel, NodeModel, NcclFacts] | None:
    """Return the properties that `to_node_link` wrote; None if the file has none, or those of another version."""
    try:
        node = dict(data["node"])
        if node["gpu"] is not None:
            node["gpu"] = GpuModel(**node["gpu"])
        facts_of = CpuModel(**data["cpu"]), NodeModel(**node), NcclFacts(**data["nccl"])
    except (TypeError, KeyError, ValueError):
        return None
    faults = [f"graph.distsim.{fault}" for facts in facts_of for fault in _untyped(facts)]
    if node["gpu"] is not None:
        faults += [f"graph.distsim.node.gpu.{fault}" for fault in _untyped(node["gpu"])]
    if facts_of[1].nvls and facts_of[1].nvlink != "nvswitch":
        faults.append(
            f"graph.distsim.node.nvls: expected false without an NVSwitch (nvlink is {_brief(facts_of[1].nvlink)})"
        )
    if isinstance(facts_of[2].net, str) and facts_of[2].net not in _NETS:
        faults.append(f"graph.distsim.nccl.net: expected one of {', '.join(_NETS)}, got {_brief(facts_of[2].net)}")
    if not faults:
        faults = [f"graph.distsim.{name}: expected a number above zero, got 0" for name in _zeros(facts_of)]
    if faults:
        raise UsageError("\n".join([f"{where}: {len(faults)} fault(s)", *(f"  {fault}" for fault in folded(faults))]))
    return facts_of


def _zeros(models: tuple[CpuModel, NodeModel, NcclFacts]) -> Iterator[str]:
    """Yield the names of figures that are zero although other figures are divided by them."""
    cpu, node, nccl = models
    needed = {
        "cpu": [f.name for f in fields(cpu) if f.type != "str" and f.name not in ("op_overhead_s", "store_latency_s")]
    }
    needed["node"] = ["ranks_per_node", "nvlink_domain_nodes", "pcie_generation", "pcie_bytes_per_s"]
    needed["node"] += ["storage_write_bytes_per_s", "storage_read_bytes_per_s"]
    needed["nccl"] = []
    if node.nvlink != "none":
        needed["node"] += [
            "nvlink_bytes_per_s",
            "nvlink_spec_bytes_per_s",
            "nvlink_pair_bytes_per_s",
            "nvlinks_per_gpu",
        ]
    if node.num_nics or nccl.num_nics or nccl.net != "none":
        needed["node"] += ["num_nics", "nic_bytes_per_s", "nic_spec_bytes_per_s"]
        needed["nccl"] += ["num_nics", "nic_bytes_per_s"]
    for name, facts in (("cpu", cpu), ("node", node), ("nccl", nccl)):
        yield from (f"{name}.{key}" for key in needed[name] if not getattr(facts, key))


def _untyped(facts: object) -> Iterator[str]:
    """Yield the fields whose values have another type than their class declares, or are physically impossible."""
    for field in fields(facts):  # type: ignore[arg-type]
        value = getattr(facts, field.name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e30
        expected = {
            "str": ("a text", isinstance(value, str) and len(value) < 200),
            "bool": ("true or false", isinstance(value, bool)),
            "int": ("a whole number", number and isinstance(value, int)),
            "float": ("a number of zero or more", number),
            "float | None": ("a number of zero or more, or null", value is None or number),
            "GpuModel | None": ("a table", value is None or isinstance(value, GpuModel)),
            "Mapping[str, float]": ("numbers by name", _numbers(value)),
            "Mapping[str, str]": ("texts by name", _texts(value)),
        }[str(field.type)]
        if not expected[1]:
            yield f"{field.name}: expected {expected[0]}, got {_brief(value)}"


def _numbers(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(isinstance(one, int | float) and not isinstance(one, bool) and 0 < one < 1e30 for one in value.values())


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) and len(one) < 200 for one in value.values())


def _brief(value: Any) -> str:
    text = brief(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
