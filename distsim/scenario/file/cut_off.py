"""Finds the hosts that a network fault cuts off, which is all that a real run can imitate of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distsim.errors import UsageError

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.faults.link_faults import NetworkRule

__all__ = ["cut_off"]


def cut_off(cluster: Cluster, rule: NetworkRule, num_hosts: int) -> tuple[int, ...]:
    """The hosts that *rule* leaves without any way out, or without any way in. `UsageError` where there is none:
    a real host has one cable, which is in or out."""
    if rule.has_detour():
        raise UsageError("a real run has no second way for the traffic; leave the detour out, or use backend = 'sim'")
    cut = set(rule.links_in(cluster))
    host_of = {vertex.name: vertex.host for vertex in cluster.vertices if vertex.kind == "nic"}
    hosts = []
    for host in range(num_hosts):
        out = [link.index for link in cluster.links if link.kind == "nic" and host_of.get(link.src) == host]
        into = [link.index for link in cluster.links if link.kind == "nic" and host_of.get(link.dst) == host]
        if (out and cut.issuperset(out)) or (into and cut.issuperset(into)):
            hosts.append(host)
    if not hosts:
        raise UsageError(
            "a real run can only cut whole hosts off, and this leaves every host a way to the others; "
            "name all NICs of one ('n0/nic*->*'), or use backend = 'sim'"
        )
    if len(hosts) == num_hosts == 1:
        raise UsageError("a real run on one host has no network to cut; take more nodes (on, nnodes)")
    return tuple(hosts)
