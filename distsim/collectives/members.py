"""The members of a collective on their cluster: who shares a node, and the links between any two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.cluster import Cluster, Reroute
from distsim.cluster.graph.cluster import padded
from distsim.collectives.plan import Loads, TransferCost


@dataclass(frozen=True)
class Routes:
    """Routes as one array: the links of each row in order, padded with -1."""

    rows: NDArray[np.int64]

    @cached_property
    def _there(self) -> NDArray[np.bool_]:
        there: NDArray[np.bool_] = self.rows >= 0
        return there

    @cached_property
    def flat(self) -> NDArray[np.int64]:
        """Return the links of all routes, one route after the other."""
        return self.rows[self._there]

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Return the number of links of each route."""
        counts: NDArray[np.int64] = self._there.sum(axis=1)
        return counts

    def links(self, index: int) -> tuple[int, ...]:
        """Return the links of the route *index*."""
        return tuple(self.rows[index][self._there[index]].tolist())

    def total(self, per_link: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of a link property over each path."""
        total = np.zeros(len(self.rows))
        for column, there in zip(self.rows.T, self._there.T, strict=True):
            total += np.where(there, per_link[column], 0.0)
        return total

    def largest(self, per_link: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the largest value of a link property on each route; 0 for a route without links."""
        if not self.rows.shape[1]:
            return np.zeros(len(self.rows))
        most: NDArray[np.float64] = np.where(self._there, per_link[self.rows], 0.0).max(axis=1)
        return most


def joined(every: Sequence[Routes]) -> Routes:
    """Concatenate several sets of routes."""
    width = max(ways.rows.shape[1] for ways in every)
    if all(ways.rows.shape[1] == width for ways in every):
        return Routes(np.concatenate([ways.rows for ways in every]))
    rows = np.full((sum(len(ways.rows) for ways in every), width), -1, dtype=np.int64)
    first = 0
    for ways in every:
        count, columns = ways.rows.shape
        rows[first : first + count, :columns] = ways.rows
        first += count
    return Routes(rows)


# -- The members of a collective on their cluster: who shares a node, over which links any two talk, by which
# NICs.

Picked = Sequence[int] | NDArray[np.int64]
"""Members, by group rank."""

_MAX_GATES = 32
"""Rings (and pairs of trees) side by side: NCCL has at most 32 channels of a kind over NICs."""


class Gate(NamedTuple):
    """A NIC and the members next to it."""

    rail: int | None
    near: tuple[int, ...]


def _spread(gates: list[Gate], count: int) -> list[Gate]:
    """Return *count* of *gates*, evenly spaced."""
    return [gates[i * len(gates) // count] for i in range(count)]


class LinkArrays:
    """Properties of all links and devices of a cluster as arrays, computed once."""

    def __init__(self, cluster: Cluster) -> None:
        links = cluster.links
        self.capacity, self.latency_s = links.bandwidth_bytes_per_s, links.latency_s
        inside = ("nvlink",) if cluster.node.nvlink != "none" else ("pcie", "c2c", "socket", "loopback")
        self.outside: NDArray[np.bool_] = ~links.are(inside)
        """Links that only traffic to other nodes crosses. If a node has NVLink, these include PCIe."""
        self.around: Reroute | None = None
        """Set while the fabric leads traffic around something."""


class Members:
    """Devices in group-rank order. Members are named by their group rank; a *node* is its members' list."""

    def __init__(self, cluster: Cluster, devices: tuple[str, ...], key: int, links: LinkArrays) -> None:
        self.cluster = cluster
        self.devices = devices
        self.key = key
        self.links = links
        self.capacity = links.capacity
        self.size = len(devices)
        self._cache: dict[Hashable, Any] = {}
        per_node = self._per_node = max(1, len(cluster.devices) // cluster.num_nodes)
        positions = cluster.positions
        self._places = np.array([*map(positions.__getitem__, devices)], dtype=np.int64)
        self.host: list[int] = (self._places // per_node).tolist()
        self.local: list[int] = (self._places % per_node).tolist()
        self.nodes: list[list[int]]
        if len(set(self.host)) == self.size:  # one on each node
            self.nodes = [[member] for member in range(self.size)]
            return
        by_host: dict[int, list[int]] = {}
        for member, host in enumerate(self.host):
            by_host.setdefault(host, []).append(member)
        self.nodes = list(by_host.values())

    @property
    def num_nodes(self) -> int:
        """Return nodes that have a member."""
        return len(self.nodes)

    @cached_property
    def per_node(self) -> int:
        """Return members of the fullest node."""
        return max(map(len, self.nodes))

    @cached_property
    def domains(self) -> list[list[int]]:
        """Return members by NVLink domain: by node, but for racks whose NVSwitches join many nodes."""
        span = self.cluster.node.nvlink_domain_nodes
        if span <= 1:
            return self.nodes
        by_domain: dict[int, list[int]] = {}
        for member, host in enumerate(self.host):
            by_domain.setdefault(host // span, []).append(member)
        return list(by_domain.values())

    @cached_property
    def per_domain(self) -> int:
        """Return members of the fullest NVLink domain."""
        return max(map(len, self.domains))

    def same_domain(self, a: int, b: int) -> bool:
        """Return whether two members communicate without a NIC."""
        span = self.cluster.node.nvlink_domain_nodes
        return self.host[a] // span == self.host[b] // span

    def leaves_domain(self, a: Picked, b: Picked) -> NDArray[np.bool_]:
        """Return a mask of the pairs that communicate through NICs."""
        domain = self._places // (self._per_node * self.cluster.node.nvlink_domain_nodes)
        away: NDArray[np.bool_] = domain[np.asarray(a, dtype=np.int64)] != domain[np.asarray(b, dtype=np.int64)]
        return away

    def rails(self, member: int) -> tuple[int, ...]:
        """Return the NICs of the node that *member* uses: an even share of those on its side."""
        return self._rails_of[self.local[member]]

    @cached_property
    def _rails_of(self) -> dict[int, tuple[int, ...]]:
        node = self.cluster.node
        nics, ranks = node.num_nics, max(1, node.ranks_per_node)
        result: dict[int, tuple[int, ...]] = {}
        for local in sorted(set(self.local)):
            first, last = local * nics // ranks, (local + 1) * nics // ranks
            result[local] = tuple(range(first, max(last, first + 1))) if nics else ()
        return result

    @cached_property
    def gates(self) -> list[list[Gate]]:
        """Return the NICs that members use, for each NVLink domain and host by host; every domain has equally many."""
        every: list[list[Gate]] = []
        rails_of, local = self._rails_of, self.local
        for domain in self.domains:
            if len(domain) == 1:
                near_it = (domain[0],)
                every.append([Gate(rail, near_it) for rail in rails_of[local[domain[0]]] or (None,)])
                continue
            near: dict[tuple[int, int], list[int]] = {}
            for member in domain:
                for rail in self.rails(member):
                    near.setdefault((self.host[member], rail), []).append(member)
            every.append([Gate(key[1], tuple(near[key])) for key in sorted(near)] or [Gate(None, tuple(domain))])
        count = min(*map(len, every), _MAX_GATES)
        return [gates if len(gates) == count else _spread(gates, count) for gates in every]

    @cached_property
    def doors(self) -> NDArray[np.int64]:
        """Return *gates* as a table, if every member is alone in its domain. Rows are members, entries are NICs, and
        -1 stands for none.
        """
        rails_of = {local: rails or (-1,) for local, rails in self._rails_of.items()}
        count = min(*map(len, rails_of.values()), _MAX_GATES)
        rows = {k: [rails[i * len(rails) // count] for i in range(count)] for k, rails in rails_of.items()}
        return np.array(rows[self.local[0]] if len(rows) == 1 else [rows[local] for local in self.local]).reshape(
            -1, count
        )

    @property
    def num_gates(self) -> int:
        """Return routes out of each domain."""
        return len(self.gates[0]) if self.per_domain > 1 else self.doors.shape[1]

    @cached_property
    def streams(self) -> int:
        """Return the number of parallel transfers in a ring or tree of the group.

        This is one for each NIC of a node. Inside a node it is one for each member, if NCCL has at least as many
        channels as GPUs.
        """
        return max(self.num_gates if len(self.domains) > 1 else 1, self.per_domain)

    def streams_at(self, cost: TransferCost) -> float:
        """Return the number of streams of a flow whose progress is counted in payload bytes instead of bytes on the
        wire.
        """
        return self.streams / (cost.net_wire if len(self.domains) > 1 else cost.wire)

    @cached_property
    def num_nics(self) -> int:
        """Return the number of NICs that members can use, in the domain that has the fewest."""
        pairs = [{(self.host[m], rail) for m in domain for rail in self.rails(m)} for domain in self.domains]
        return max(1, min(len(nics) for nics in pairs))

    def route(self, a: int, b: int, rail: int | None = None) -> tuple[int, ...]:
        """Return links from member *a* to member *b*."""
        if rail is not None and self.same_domain(a, b):
            rail = None
        links = self.cluster.route(self.devices[a], self.devices[b], self.key, rail)
        return links if self.links.around is None else self.links.around.route(links, self.key)

    def ways(
        self,
        src: Picked,
        dst: Picked,
        rails: Picked | None = None,
        enters: Picked | None = None,
    ) -> Routes:
        """Return the links between many pairs of members, out of a node by the NICs *rails* (-1: whichever), into
        the other by *enters*, where these are others.
        """
        a, b = self._places[np.asarray(src, dtype=np.int64)], self._places[np.asarray(dst, dtype=np.int64)]
        forced = np.full(len(a), -1) if rails is None else np.array(rails, dtype=np.int64)
        into = forced if enters is None else np.array(enters, dtype=np.int64)
        if rails is not None:
            near = ~self.leaves_domain(src, dst)
            forced[near] = into[near] = -1
        rows = self.cluster.routes(a, b, self.key, forced, into)
        around = self.links.around
        if around is not None:
            rows = padded([around.route(tuple(row[row >= 0].tolist()), self.key) for row in rows])
        return Routes(rows)

    def latency_s(self, links: Iterable[int]) -> float:
        """Return the sum of the links' latencies."""
        return float(sum(self.links.latency_s[np.fromiter(links, dtype=np.int64)].tolist()))

    def loads_of(self, ways: Routes, share: float | NDArray[np.float64]) -> Loads:
        """Return the loads of transfers over *ways*, *share* bytes per byte of progress each."""
        flat, counts = ways.flat, ways.counts
        if not len(flat):
            return Loads(np.zeros(0, dtype=np.int64), np.zeros(0))
        weights = np.repeat(np.broadcast_to(share, len(counts)), counts)
        total = np.bincount(flat, weights, minlength=len(self.capacity)).astype(np.float64)
        used = np.flatnonzero(total)
        return Loads(used, total[used])

    def loads(self, paths: Iterable[tuple[tuple[int, ...], float]]) -> Loads:
        """Return the loads of transfers given as (links, bytes per byte of progress)."""
        links, shares = [], []
        for way, share in paths:
            links.append(way)
            shares.append(share)
        return self.loads_of(Routes(padded(links)), np.array(shares))

    def loads_of_one(self, way: Iterable[int]) -> Loads:
        """Return the loads of one transfer over the links *way*: a few, so not looked for among all the cluster has."""
        times = Counter(way)
        used = sorted(times)
        return Loads(np.array(used, dtype=np.int64), np.array([float(times[link]) for link in used]))

    def with_cost(self, loads: Loads, cost: TransferCost) -> Loads:
        """Return *loads*, including the additional bytes that the protocol of *cost* sends."""
        if cost.wire == 1.0 and cost.net_wire == 1.0:
            return loads
        wire = np.where(self.links.outside[loads.links], cost.net_wire, cost.wire)
        return Loads(loads.links, loads.weights * wire)

    def slowest_s_per_byte(self, loads: Loads) -> float:
        """Return seconds per byte of progress if the links are otherwise idle."""
        if not len(loads.links):
            return 0.0
        return float((loads.weights / self.capacity[loads.links]).max())

    def cached(self, name: Hashable, make: Any) -> Any:
        """Return the result of *make()*, which is called only once for each *name*."""
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]
