"""A cluster in few words: its kinds of links, its switches in groups, its numbers in ranges. No rendering
here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from distsim.cluster.graph.cluster import Cluster
from distsim.cluster.graph.link import Vertex
from distsim.errors import UsageError

__all__ = ["LinkKind", "SwitchGroup", "host_parts", "link_kinds", "ranges", "switch_groups", "to_json"]

_ORDER = ("nvlink", "c2c", "pcie", "socket", "loopback", "nic", "fabric")
_FEW = 6
"""Up to so many groups of switches are told apart."""


@dataclass(frozen=True, slots=True)
class LinkKind:
    """Links of one kind, bandwidth and latency, between the same kinds of hardware."""

    kind: str
    between: str
    count: int
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class SwitchGroup:
    """Switches that serve the same hosts (or, above those, that have the same cables down)."""

    switches: tuple[str, ...]
    kind: str
    hosts: tuple[int, ...]
    below: tuple[str, ...]
    bandwidth_bytes_per_s: float
    """Of one link from below."""
    apart: int = 1
    """How many sets of hosts are joined in this group, each served by its own share of the switches."""


def link_kinds(cluster: Cluster) -> list[LinkKind]:
    """All links, counted by what they are."""
    kind_of = {vertex.name: vertex.kind for vertex in cluster.vertices}
    counts: dict[tuple[str, str, float, float], int] = {}
    for link in cluster.links:
        a, b = kind_of[link.src], kind_of[link.dst]
        between = a if link.src == link.dst else " - ".join((a, b) if _height(a) <= _height(b) else (b, a))
        key = (link.kind, between, link.bandwidth_bytes_per_s, link.latency_s)
        counts[key] = counts.get(key, 0) + 1
    order = {kind: position for position, kind in enumerate(_ORDER)}
    found = [LinkKind(kind, between, count, rate, latency) for (kind, between, rate, latency), count in counts.items()]
    merged: dict[tuple[str, str, float], LinkKind] = {}
    for entry in found:  # up and down differ by a switch's latency: one row, the longer of the two
        key2 = (entry.kind, entry.between, entry.bandwidth_bytes_per_s)
        other = merged.get(key2)
        count = entry.count + (other.count if other else 0)
        latency = max(entry.latency_s, other.latency_s if other else 0.0)
        merged[key2] = LinkKind(entry.kind, entry.between, count, entry.bandwidth_bytes_per_s, latency)
    return sorted(merged.values(), key=lambda entry: (order.get(entry.kind, len(order)), entry.between))


def _height(kind: str) -> int:
    return ("gpu", "cpu", "nvswitch", "nic", "pcie", "leaf", "spine", "switch").index(kind)


def switch_groups(cluster: Cluster) -> list[SwitchGroup]:
    """The switches outside the hosts, in groups of those that serve the same."""
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
    """Neighbours that serve equally many hosts as one."""
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
    """`0-3,6` for 0, 1, 2, 3, 6."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def host_parts(cluster: Cluster, host: int = 0) -> dict[str, list[Vertex]]:
    """What hangs below each socket, PCIe switch or (under the empty name) the host itself."""
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


def to_json(cluster: Cluster) -> dict[str, Any]:
    """What `distsim topo show --json` prints; the bisection is null where it would take too long."""
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
