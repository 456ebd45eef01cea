"""Routes around links that are down: what a fabric's routing finds once it has noticed.

Only switches route anew. A NIC, a PCIe slot or an NVLink that is down has nobody before it who could
choose another one, so a route whose host is cut off stays as it is, and stalls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from distsim.cluster.graph.cluster import Cluster
from distsim.cluster.graph.tree_fabric import mix

__all__ = ["Reroute"]

SWITCHES = ("leaf", "spine", "switch")


class Reroute:
    """Routes of *cluster* while the links *down* are to be avoided."""

    def __init__(self, cluster: Cluster, down: Collection[int]) -> None:
        self._links = cluster.links
        self._down = frozenset(down)
        self._switches = frozenset(v.name for v in cluster.vertices if v.kind in SWITCHES)
        self._into: dict[str, list[int]] = {}
        self._out: dict[str, list[int]] = {}
        for link in cluster.links:
            if link.index not in self._down and link.src in self._switches and link.dst in self._switches:
                self._into.setdefault(link.dst, []).append(link.index)
                self._out.setdefault(link.src, []).append(link.index)
        self._hops: dict[str, dict[str, int]] = {}

    def route(self, route: tuple[int, ...], key: int = 0) -> tuple[int, ...]:
        """*route* with its part between switches led over links that are up, the fewest; among equal ways a
        hash of its ends and *key* decides. As it was where nothing of it is down, or there is no way."""
        if self._down.isdisjoint(route):
            return route
        links = self._links
        inside = [i for i, n in enumerate(route) if links[n].src in self._switches and links[n].dst in self._switches]
        if not inside:
            return route
        first, last = inside[0], inside[-1]
        if not self._down.isdisjoint(route[:first] + route[last + 1 :]):
            return route
        here, goal = links[route[first]].src, links[route[last]].dst
        hops = self._hops_to(goal)
        if here not in hops:
            return route
        way: list[int] = []
        while here != goal:
            onwards = [n for n in self._out[here] if hops.get(links[n].dst, len(links)) == hops[here] - 1]
            way.append(onwards[mix(route[0], route[-1], key, len(way)) % len(onwards)])
            here = links[way[-1]].dst
        return (*route[:first], *way, *route[last + 1 :])

    def _hops_to(self, goal: str) -> dict[str, int]:
        """How many links from each switch to *goal*."""
        if goal not in self._hops:
            hops, waiting = {goal: 0}, deque([goal])
            while waiting:
                here = waiting.popleft()
                for number in self._into.get(here, ()):
                    before = self._links[number].src
                    if before not in hops:
                        hops[before] = hops[here] + 1
                        waiting.append(before)
            self._hops[goal] = hops
        return self._hops[goal]
