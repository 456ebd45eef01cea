"""Prints clusters: a summary, and tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from typing_extensions import TypedDict

from distsim.cluster.graph.cluster import Cluster
from distsim.cluster.graph.link import STORAGE_READ_BYTES_PER_S, STORAGE_WRITE_BYTES_PER_S, NodeModel, Vertex
from distsim.errors import UsageError
from distsim.text.ranks import format_ranks, ranges_of
from distsim.text.units import format_bandwidth, format_time

# -- A cluster in few words: its kinds of links, its switches in groups, its numbers in ranges. No rendering
# here.

_ORDER = ("nvlink", "c2c", "pcie", "socket", "loopback", "nic", "fabric")
_FEW = 6
"""Maximum number of groups of switches that are listed separately."""


@dataclass(frozen=True, slots=True)
class LinkKind:
    """Number of links with equal kind, bandwidth and latency between the same kinds of hardware."""

    kind: str
    between: str
    count: int
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class SwitchGroup:
    """Switches that connect the same hosts or, at higher levels, that have the same downward cables."""

    switches: tuple[str, ...]
    kind: str
    hosts: tuple[int, ...]
    below: tuple[str, ...]
    bandwidth_bytes_per_s: float
    """Bytes/s of one link from below."""
    apart: int = 1
    """Number of disjoint sets of hosts that the group combines, each served by its own switches."""


def link_kinds(cluster: Cluster) -> list[LinkKind]:
    """Return all links, counted by kind."""
    kind_of = {vertex.name: vertex.kind for vertex in cluster.vertices}
    counts: Counter[tuple[str, str, float]] = Counter()
    latency_s: dict[tuple[str, str, float], float] = {}
    for link in cluster.links:
        a, b = kind_of[link.src], kind_of[link.dst]
        between = a if link.src == link.dst else " - ".join((a, b) if _height(a) <= _height(b) else (b, a))
        key = (link.kind, between, link.bandwidth_bytes_per_s)
        counts[key] += 1
        # up and down differ by a switch's latency: one row, the longer of the two
        latency_s[key] = max(latency_s.get(key, 0.0), link.latency_s)
    order = {kind: position for position, kind in enumerate(_ORDER)}
    kinds = [LinkKind(*key[:2], count, key[2], latency_s[key]) for key, count in counts.items()]
    return sorted(kinds, key=lambda entry: (order.get(entry.kind, len(order)), entry.between))


def _height(kind: str) -> int:
    return ("gpu", "cpu", "nvswitch", "nic", "pcie", "leaf", "spine", "switch").index(kind)


def switch_groups(cluster: Cluster) -> list[SwitchGroup]:
    """Return the switches outside the hosts, grouped by the hosts that they serve."""
    vertices = {vertex.name: vertex for vertex in cluster.vertices}
    hosts: dict[str, dict[int, None]] = {}
    below: dict[str, dict[str, None]] = {}
    rate: dict[str, float] = {}
    for link in cluster.links:
        src, dst = vertices[link.src], vertices[link.dst]
        if dst.host is not None or link.src == link.dst:
            continue
        if src.host is not None:
            hosts.setdefault(dst.name, {})[src.host] = None
        elif _height(src.kind) < _height(dst.kind):
            below.setdefault(dst.name, {})[src.name] = None
        if src.host is not None or dst.name not in hosts:
            rate.setdefault(dst.name, link.bandwidth_bytes_per_s)
    grouped: dict[tuple[str, tuple[int, ...], tuple[str, ...], float], list[str]] = {}
    for vertex in cluster.vertices:
        if vertex.host is None:
            served = tuple(sorted(hosts.get(vertex.name, ())))
            under = () if served else tuple(below.get(vertex.name, ()))
            key = (vertex.kind, served, under, rate.get(vertex.name, 0.0))
            grouped.setdefault(key, []).append(vertex.name)
    groups = [
        SwitchGroup(tuple(names), kind, served, under, bandwidth)
        for (kind, served, under, bandwidth), names in grouped.items()
    ]
    return groups if len(groups) <= _FEW else _joined(groups)


def _joined(groups: list[SwitchGroup]) -> list[SwitchGroup]:
    """Combine neighbouring groups that serve equally many hosts."""
    joined: list[SwitchGroup] = []
    shape: tuple[object, ...] = ()
    for group in groups:
        this = (group.kind, len(group.hosts), len(group.switches), group.bandwidth_bytes_per_s)
        if joined and this == shape:
            last = joined[-1]
            joined[-1] = replace(
                last,
                switches=last.switches + group.switches,
                hosts=last.hosts + group.hosts,
                below=last.below + group.below,
                apart=last.apart + 1,
            )
        else:
            joined.append(group)
        shape = this
    return joined


def ranges(numbers: Iterable[int]) -> str:
    """Return `0-3,6` for 0, 1, 2, 3, 6."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges_of(numbers))


def host_parts(cluster: Cluster, host: int = 0) -> dict[str, list[Vertex]]:
    """Return the parts below each socket or PCIe switch; the empty name stands for the host itself."""
    inside = [vertex for vertex in cluster.vertices if vertex.host == host]
    names = {vertex.name: vertex for vertex in inside}
    parent: dict[str, str] = {}
    for link in cluster.links:
        above = names.get(link.dst)
        if link.kind in ("pcie", "c2c") and link.src in names and above and above.kind in ("pcie", "cpu"):
            src = names[link.src]
            if src.kind != "cpu" and not (src.kind == "pcie" and above.kind == "pcie" and above.local > src.local):
                parent.setdefault(link.src, link.dst)
    children: dict[str, list[Vertex]] = {}
    for vertex in inside:
        children.setdefault(parent.get(vertex.name, ""), []).append(vertex)
    return children


class ClusterReport(TypedDict):
    """A cluster as the simulator sees it (`distsim topo show --json`)."""

    schema: Literal["distsim.topo/1"]
    name: str
    description: str
    source: str
    variant: str | None
    measured: Any
    constants: dict[str, Any]
    num_nodes: int
    world_size: int
    devices: list[str]
    """The device of each rank."""
    bisection_bandwidth_bytes_per_s: float | None
    """Null if it takes too long to compute."""
    num_links: int
    link_kinds: list[dict[str, Any]]
    """Links by kind, bandwidth and latency, with their `count`."""
    node: dict[str, Any]
    cpu: dict[str, Any]
    nccl: dict[str, Any]


def to_json(cluster: Cluster) -> ClusterReport:
    """Return the JSON of `distsim topo show --json`; the bisection is null if it would take too long."""
    bisection: float | None
    try:
        bisection = cluster.bisection_bandwidth_bytes_per_s()
    except UsageError:
        bisection = None
    return {
        "schema": "distsim.topo/1",
        "name": cluster.name,
        "description": cluster.description,
        "source": cluster.source,
        "variant": cluster.variant,
        "measured": cluster.measured,
        "constants": {name: asdict(one) for name, one in cluster.constants.items()},
        "num_nodes": cluster.num_nodes,
        "world_size": len(cluster.devices),
        "devices": list(cluster.devices),
        "bisection_bandwidth_bytes_per_s": bisection,
        "num_links": len(cluster.links),
        "link_kinds": [asdict(entry) for entry in link_kinds(cluster)],
        "node": asdict(cluster.node),
        "cpu": asdict(cluster.cpu),
        "nccl": asdict(cluster.nccl),
    }


# -- Clusters for people (rich): the list of presets; one cluster as a summary, a table of links and trees.

_MAX_GROUPS = 8
_WIDE = 110


def render_list(clusters: Sequence[tuple[str, Cluster]], width: int) -> RenderableType:
    """Return a table of all presets, with their sources if *width* allows."""
    table = _table("name", ">nodes", ">GPUs", ">GB/s", "NICs")
    table.columns[-1].no_wrap = True
    table.add_column("what it is", ratio=3)
    if width >= _WIDE:
        table.add_column("source", ratio=2, style="dim")
    for name, cluster in clusters:
        node = cluster.node
        intra = node.nvlink_bytes_per_s or node.pcie_bytes_per_s if node.num_gpus else 0.0
        row = [
            name,
            str(cluster.num_nodes),
            str(node.num_gpus) if node.num_gpus else "-",
            f"{intra / 1e9:.0f}" if intra else "-",
            f"{node.num_nics}x{node.nic_spec_bytes_per_s * 8e-9:.0f}G {cluster.nccl.net}",
            cluster.description,
        ]
        table.add_row(*row, *([cluster.source] if width >= _WIDE else []))
    note = Text(
        "GPUs and NICs of one node; GB/s a GPU inside the node, one direction. NAME:N is N nodes "
        "(gb200-nvl72:N is N racks).",
        style="dim",
    )
    return Group(table, Text(), note)


def _table(*heads: str) -> Table:
    """Return a table without lines. A column whose head begins with `>` is aligned to the right, and not wrapped."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for number, head in enumerate(heads):
        right, style = head[:1] == ">", "" if number else "cyan"
        table.add_column(
            head.removeprefix(">"), justify="right" if right else "left", no_wrap=right or not number, style=style
        )
    return table


def render_cluster(cluster: Cluster, variants: Mapping[str, str] | None = None) -> RenderableType:
    """Return a summary, the links, one node and the fabric. *variants* are the software variants of the preset."""
    return Group(
        *_summary(cluster, variants or {}),
        *_constants(cluster),
        Text(),
        _links(cluster),
        Text(),
        _node_tree(cluster),
        *_fabric_tree(cluster),
    )


def _summary(cluster: Cluster, variants: Mapping[str, str]) -> Iterable[RenderableType]:
    node, per_node = cluster.node, cluster.node.ranks_per_node
    yield Text(cluster.name, style="bold cyan") + Text(f"  {cluster.description}", style="default")
    if cluster.source:
        yield Text(f"source: {cluster.source}", style="dim")
    if cluster.node.num_gpus:
        measured = cluster.measured or f"no times; NCCL's constants come from other machines with {cluster.nccl.net}"
        yield Text(f"measured: {measured}", style="dim")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    total = len(cluster.devices)
    model = node.gpu_model or "sockets"
    plural = "node" if cluster.num_nodes == 1 else "nodes"
    table.add_row("ranks", f"{total} ({cluster.num_nodes} {plural} x {per_node} {model})")
    table.add_row("placement", _placement(cluster))
    if len(cluster.kinds) > 1:
        for kind, hosts in cluster.kinds:
            nics = f"{kind.num_nics} NICs of {format_bandwidth(kind.nic_bytes_per_s)}"
            names = f"n{format_ranks(hosts).replace(',', ', n')}"
            table.add_row("kind of node", f"{names}: {kind.gpu_model or 'no GPUs'}, {nics}")
    if (gpu := node.gpu) is not None:
        parts = [gpu.model]
        if gpu.memory_bytes and gpu.memory_bytes_per_s:
            parts.append(f"{gpu.memory_bytes / 1e9:.0f} GB at {format_bandwidth(gpu.memory_bytes_per_s)}")
        if rate := gpu.flops_per_s.get("bf16") or gpu.flops_per_s.get("fp16"):
            parts.append(f"{rate / 1e12:,.0f} TFLOPS bf16 dense")
        table.add_row("accelerator", ", ".join(parts))
    cpu = cluster.cpu
    table.add_row("processor", f"{cpu.model}, {cpu.num_sockets} x {cpu.cores_per_socket} cores")
    if cluster.spec is not None and (nic := cluster.spec.node.nic) is not None:
        table.add_row("NICs", f"{nic.count} x {nic.model or nic.net}, {nic.bandwidth * 8e-9:,.0f} Gbit/s {nic.net}")
    if node.num_gpus:
        table.add_row("software", f"{cluster.nccl.software}{f' ({cluster.variant})' if cluster.variant else ''}")
    for name, model in variants.items():
        if name != cluster.variant:
            table.add_row("", f"or {cluster.name.partition(':')[0]}:{name}: {model}")
    if node.num_gpus and not (node.pcie_peer_to_peer and (node.gpu_direct_rdma or not node.num_nics)):
        table.add_row("host memory", _staged(cluster))
    if node.num_gpus:
        table.add_row("checkpoints", _storage(node))
    table.add_row("bisection", _bisection(cluster))
    yield table


def _constants(cluster: Cluster) -> Iterable[RenderableType]:
    """Show the constants that `distsim calibrate` fitted to this cluster."""
    if not (cluster.constants or cluster.errors):
        return
    table = _table("fitted", ">value", ">give or take", "to")
    for name, one in cluster.constants.items():
        table.add_row(name, f"{one.value:.4g}", f"{math.expm1(one.uncertainty):.0%}", one.source)
    yield Text()
    yield table
    if cluster.errors:
        spread = _table("its logs", ">measured / simulated, 8 of 10")
        for name, (low, high, operations) in cluster.errors.items():
            spread.add_row(f"{name}{' of ' if operations else ''}{', '.join(operations)}", f"{low:.2f} to {high:.2f}")
        yield Text()
        yield spread


def _staged(cluster: Cluster) -> str:
    """Show transfers that go through host memory because no device can access GPU memory directly."""
    node = cluster.node
    peers = (
        [] if node.pcie_peer_to_peer else ["between GPUs" if node.nvlink == "none" else "between GPUs without NVLink"]
    )
    nics = [] if node.gpu_direct_rdma or not node.num_nics else ["between GPUs and NICs"]
    return f"carries what goes {' and '.join([*peers, *nics])}"


def _storage(node: NodeModel) -> str:
    write, read = node.storage_write_bytes_per_s, node.storage_read_bytes_per_s
    usual = (write, read) == (STORAGE_WRITE_BYTES_PER_S, STORAGE_READ_BYTES_PER_S)
    borrowed = " (borrowed: set node.storage_write, storage_read)" if usual else ""
    return f"{format_bandwidth(write)} written, {format_bandwidth(read)} read by a node{borrowed}"


def _placement(cluster: Cluster) -> str:
    per_node = cluster.node.ranks_per_node
    shown = [f"{ranges(range(h * per_node, (h + 1) * per_node))} on n{h}" for h in range(min(2, cluster.num_nodes))]
    if cluster.num_nodes > 3:
        shown.append("...")
    if cluster.num_nodes > 2:
        last = cluster.num_nodes - 1
        shown.append(f"{ranges(range(last * per_node, (last + 1) * per_node))} on n{last}")
    return f"rank {', '.join(shown)}"


def _bisection(cluster: Cluster) -> str:
    try:
        rate = cluster.bisection_bandwidth_bytes_per_s()
    except UsageError as error:
        return f"not computed: {error}"
    if not rate:
        return "none: one device"
    half = len(cluster.devices) // 2
    if cluster.num_nodes > 1:
        domain = cluster.node.nvlink_domain_nodes if cluster.node.nvlink_domain_nodes < cluster.num_nodes else 1
        half = -(-cluster.num_nodes // domain) // 2 * domain * cluster.node.ranks_per_node
    return f"{format_bandwidth(rate)} each way between halves, {format_bandwidth(rate / half)} a device"


def _links(cluster: Cluster) -> Table:
    table = _table("links", "between", ">count", ">GB/s each way", ">latency")
    for entry in link_kinds(cluster):
        table.add_row(
            entry.kind,
            entry.between,
            f"{entry.count:,}",
            f"{entry.bandwidth_bytes_per_s / 1e9:,.1f}",
            format_time(entry.latency_s),
        )
    table.add_row("all", "", f"{len(cluster.links):,}", "", "", style="dim")
    return table


def _node_tree(cluster: Cluster) -> Tree:
    node = cluster.node_of(0)
    tree = Tree(Text("one node" if len(cluster.kinds) == 1 else "node n0", style="bold"))
    children = host_parts(cluster)
    gpus = [vertex for vertex in cluster.vertices if vertex.host == 0 and vertex.kind == "gpu"]
    if node.nvlink == "nvswitch" and node.nvlink_domain_nodes == 1:
        sharp = ", reduces (NVLS)" if node.nvls else ""
        rate = format_bandwidth(node.nvlink_bytes_per_s)
        tree.add(f"NVSwitch: gpu{ranges(g.local for g in gpus)}, {rate} each{sharp}")
    elif node.nvlink == "nvswitch":
        tree.add(f"NVSwitch of {node.nvlink_domain_nodes} nodes: {format_bandwidth(node.nvlink_bytes_per_s)} a GPU")
    elif node.nvlink == "mesh":
        rate = format_bandwidth(node.nvlink_pair_bytes_per_s)
        tree.add(f"NVLink mesh: gpu{ranges(g.local for g in gpus)}, {rate} a pair")

    def grow(branch: Tree, name: str) -> None:
        for vertex in sorted(children.get(name, []), key=_rank_of_kind):
            if vertex.kind != "nvswitch":
                grow(branch.add(_label(vertex, cluster)), vertex.name)

    grow(tree, "")
    return tree


def _rank_of_kind(vertex: Vertex) -> tuple[int, int]:
    order = {"cpu": 0, "pcie": 1, "gpu": 2, "nic": 3}
    return order.get(vertex.kind, 9), vertex.local


def _label(vertex: Vertex, cluster: Cluster) -> Text:
    label = Text(vertex.name.rpartition("/")[2], style={"gpu": "green", "nic": "magenta"}.get(vertex.kind, "default"))
    if vertex.name in cluster.devices[: cluster.node.ranks_per_node]:
        label.append(f"  rank {cluster.devices.index(vertex.name)}", style="dim")
    if vertex.kind == "nic":
        label.append(f"  {cluster.nccl.net} {format_bandwidth(cluster.node_of(0).nic_bytes_per_s)}", style="dim")
    return label


def _fabric_tree(cluster: Cluster) -> Iterable[RenderableType]:
    groups = switch_groups(cluster)
    if not groups:
        return
    tree = Tree(Text("between nodes", style="bold"))
    for group in groups[:_MAX_GROUPS]:
        serves = f"n{ranges(group.hosts)}" if group.hosts else _names(group.below)
        if group.apart > 1 and group.hosts:
            each = len(group.hosts) // group.apart
            serves += f" ({'a node' if each == 1 else f'{each} nodes'} each)"
        rate = f", {format_bandwidth(group.bandwidth_bytes_per_s)} a link" if group.hosts or group.below else ""
        tree.add(f"{_names(group.switches)}: {serves}{rate}")
    if len(groups) > _MAX_GROUPS:
        tree.add(Text(f"... and {len(groups) - _MAX_GROUPS} more groups of switches", style="dim"))
    yield Text()
    yield tree


def _names(names: Sequence[str]) -> str:
    """Return `leaf0-7` for leaf0 to leaf7; the first and the last name if they are not consecutive."""
    stems = [name.rstrip("0123456789") for name in names]
    if len({*stems}) == 1 and all(name != stem for name, stem in zip(names, stems, strict=True)):
        return stems[0] + ranges(int(name[len(stem) :]) for name, stem in zip(names, stems, strict=True))
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})" if names else "nothing"
