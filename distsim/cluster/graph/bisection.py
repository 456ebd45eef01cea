"""Bisection bandwidth: the largest flow from the first half of the devices to the second, in one direction.

Where there are several hosts the halves are whole hosts, and whole NVLink domains where hosts share them.
Only the network that routes between the halves use counts: NVLink inside an NVLink domain, otherwise NICs and
fabric; that a host could also send through PCIe what its NVLinks cannot carry is left out, as no route does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from distsim.cluster.graph.host_template import HostTemplate
from distsim.cluster.graph.link import Link, Links
from distsim.cluster.graph.tree_fabric import Fabric
from distsim.errors import UsageError

__all__ = ["MAX_LINKS", "bisect_hosts", "max_flow"]

MAX_LINKS = 60_000
"""Above this many links (after hosts are folded into their NICs) a maximum flow takes longer than a user
waits.
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
        """In rank order."""

    @property
    def links(self) -> Links:
        """By index."""


def max_flow(links: Iterable[tuple[str, str, float]], sources: Sequence[str], sinks: Sequence[str]) -> float:
    """Maximum flow from all *sources* to all *sinks* over directed *links* (src, dst, bytes a second)."""
    import networkx

    graph: networkx.DiGraph[str] = networkx.DiGraph()
    for src, dst, bandwidth in links:
        if graph.has_edge(src, dst):
            graph[src][dst]["capacity"] += round(bandwidth)
        else:
            graph.add_edge(src, dst, capacity=round(bandwidth))
    if graph.number_of_edges() > MAX_LINKS:
        raise UsageError(f"bisection bandwidth is computed up to {MAX_LINKS} links, got {graph.number_of_edges()}")
    for name in sources:
        graph.add_edge("<source>", name)
    for name in sinks:
        graph.add_edge(name, "<sink>")
    return float(networkx.maximum_flow_value(graph, "<source>", "<sink>"))


def bisect_hosts(wiring: EqualHosts) -> float:
    """The bisection of equal hosts on a fabric, each host folded into what it can send through each NIC."""
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
