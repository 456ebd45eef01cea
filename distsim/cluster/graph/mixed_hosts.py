"""Connects hosts of several kinds, which have equally many devices, by one fabric."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from distsim.cluster.graph.cluster import Places, Rows, one_by_one
from distsim.cluster.graph.fabrics import mix
from distsim.cluster.graph.link import Links, NodeModel, Vertex
from distsim.cluster.graph.wiring import HostsOnFabric
from distsim.errors import UsageError


class MixedHosts:
    """Host i is built like the hosts of `kinds[kind_of[i]]`; all kinds have the same fabric and as many devices.

    Links are numbered as in `HostsOnFabric`, but for blocks of several sizes: those of each host, then the fabric's.
    """

    def __init__(self, kinds: Sequence[HostsOnFabric], kind_of: Sequence[int]) -> None:
        self._hosts = [kinds[kind] for kind in kind_of]
        self._kinds = list(kinds)
        self.fabric, self.per_host = kinds[0].fabric, kinds[0].per_host
        self._starts = np.cumsum([0, *(host.block for host in self._hosts)])

    @cached_property
    def devices(self) -> list[str]:
        """Return the devices in rank order."""
        return [f"n{i}/{device}" for i, host in enumerate(self._hosts) for device in host.template.devices]

    @cached_property
    def vertices(self) -> list[Vertex]:
        """Return the vertices: first those of the hosts, then the switches."""
        inside = [
            Vertex(f"n{i}/{part.name}", part.kind, i, part.local)
            for i, host in enumerate(self._hosts)
            for part in host.template.parts
        ]
        return [*inside, *(vertex for vertex in self._kinds[0].vertices if vertex.host is None)]

    @cached_property
    def links(self) -> Links:
        """Return the links: a block for each host, then the fabric's cables."""
        first = self._kinds[0]
        blocks = [host.links[i * host.block : (i + 1) * host.block] for i, host in enumerate(self._hosts)]
        return Links.of([*itertools.chain(*blocks), *first.links[first.block * len(self._hosts) :]])

    def route(self, src: int, dst: int, flow_key: int, rail: int | None, enter: int | None = None) -> tuple[int, ...]:
        """Return the route inside the host, or out by NIC *rail*, over the fabric, and in by NIC *enter*. A host that
        lacks that NIC uses its last one.
        """
        (host, i), (other, j) = divmod(src, self.per_host), divmod(dst, self.per_host)
        here, there = self._hosts[host], self._hosts[other]
        base, other_base = int(self._starts[host]), int(self._starts[other])
        if host == other:
            return tuple(base + index for index in here.route(i, j, flow_key, rail, enter))
        fabric = self.fabric
        if fabric is None:
            raise UsageError(f"nothing connects {self.devices[src]} and {self.devices[dst]}: the nodes have no NIC")
        flow = mix(src, dst, flow_key)
        k = here.nic(i, flow, _at_most(rail, here))
        m = there.nic(j, flow, _at_most(rail if enter is None else enter, there))
        out, back = here.template.to_nic[i][k], there.template.from_nic[m][j]
        if out is None or back is None:
            raise UsageError(f"nothing connects {self.devices[src]} to NIC {k} of its node")
        cables = fabric.path(fabric.attach(host, k), fabric.attach(other, m), flow >> 16)
        return (
            *[base + index for index in (*out, here.nic_base + 2 * k)],
            *[int(self._starts[-1]) + index for index in cables],
            *[other_base + index for index in (there.nic_base + 2 * m + 1, *back)],
        )

    def routes(self, src: Places, dst: Places, flow_key: int, rails: Places, enters: Places | None = None) -> Rows:
        """Return `route` of many pairs, one row each, padded with -1."""
        return one_by_one(self.route, src, dst, flow_key, rails, rails if enters is None else enters)

    def bisection_bandwidth_bytes_per_s(self) -> float:
        """Return the bisection bandwidth in bytes/s that the cluster has at least: if all hosts were of its worst
        kind."""
        return min(kind.bisection_bandwidth_bytes_per_s() for kind in self._kinds)


def _at_most(rail: int | None, hosts: HostsOnFabric) -> int | None:
    return None if rail is None else min(rail, len(hosts.template.nics) - 1)


def slowest(nodes: Sequence[NodeModel]) -> NodeModel:
    """Return a node with the least that each of *nodes* has: NCCL agrees on channels, algorithms and protocols by the
    minimum over all ranks (ncclAllGather of graphInfo in src/init.cc, initTransportsRank).
    """
    least = (
        *("nvlinks_per_gpu", "nvlink_bytes_per_s", "nvlink_spec_bytes_per_s", "nvlink_pair_bytes_per_s", "nvls"),
        *("pcie_generation", "pcie_bytes_per_s", "pcie_peer_to_peer", "num_nics", "nic_bytes_per_s"),
        *("nic_spec_bytes_per_s", "gpu_direct_rdma", "storage_write_bytes_per_s", "storage_read_bytes_per_s"),
    )
    return replace(nodes[0], **{name: min(getattr(node, name) for node in nodes) for name in least})
