"""Fabrics without a hierarchy of switches: torus, ring, full mesh, dragonfly. A router a host, or a switch
for several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.cluster.graph.tree_fabric import Cables, Ports

__all__ = ["DragonflyFabric", "MeshFabric", "TorusFabric"]


class TorusFabric:
    """Routers in a grid with wraparound, one a host; a ring is a torus of one dimension.

    Paths go dimension by dimension, the shorter way round (on a tie *key* decides). Where a dimension has two
    routers there is one cable each way between them, not two.
    """

    def __init__(
        self, ports: Ports, dims: Sequence[int], bandwidth_bytes_per_s: float | None, switch_latency_s: float
    ) -> None:
        self.switch_latency_s = switch_latency_s
        self._dims = tuple(dims)
        count = math.prod(self._dims)
        self.switches = [(f"router{i}", "switch") for i in range(count)]
        ends: list[tuple[int, int]] = []
        self._forward: list[list[int]] = []
        self._backward: list[list[int]] = []
        rate = bandwidth_bytes_per_s or ports.num_nics * ports.nic_bytes_per_s
        stride = 1
        for extent in self._dims:
            forward, backward = [-1] * count, [-1] * count
            for router in range(count):
                at = router // stride % extent
                if extent == 1 or (extent == 2 and at == 1):
                    continue
                other = router + ((at + 1) % extent - at) * stride
                forward[router] = len(ends)
                backward[other] = len(ends) + 1
                if extent == 2:
                    backward[router], forward[other] = forward[router], backward[other]
                ends += [(router, other), (other, router)]
            self._forward.append(forward)
            self._backward.append(backward)
            stride *= extent
        src, dst = np.array(ends, dtype=np.int64).reshape(len(ends), 2).T
        self.cables = Cables(src, dst, np.full(len(ends), float(rate)))

    def attach(self, host: Any, nic: Any) -> Any:
        """The host's own router."""
        return host

    def path(self, src: int, dst: int, key: int) -> tuple[int, ...]:
        """Each dimension in turn."""
        cables: list[int] = []
        here, stride = src, 1
        for axis, extent in enumerate(self._dims):
            at, goal = here // stride % extent, dst // stride % extent
            ahead = (goal - at) % extent
            behind = extent - ahead
            onward = ahead < behind or (ahead == behind and key % 2 == 0)
            step, table = (1, self._forward) if onward else (-1, self._backward)
            while at != goal:
                cables.append(table[axis][here])
                following = (at + step) % extent
                here += (following - at) * stride
                at = following
            stride *= extent
        return tuple(cables)


class MeshFabric:
    """A router a host, each with a cable to every other."""

    def __init__(self, ports: Ports, bandwidth_bytes_per_s: float | None, switch_latency_s: float) -> None:
        self.switch_latency_s = switch_latency_s
        count = self._count = ports.num_hosts
        self.switches = [(f"router{i}", "switch") for i in range(count)]
        rate = bandwidth_bytes_per_s or ports.num_nics * ports.nic_bytes_per_s / max(1, count - 1)
        src, dst = _pairs(count)
        self.cables = Cables(src, dst, np.full(len(src), float(rate)))

    def attach(self, host: Any, nic: Any) -> Any:
        """The host's own router."""
        return host

    def path(self, src: int, dst: int, key: int) -> tuple[int, ...]:
        """The one cable."""
        return (src * (self._count - 1) + dst - (dst > src),) if src != dst else ()


def _pairs(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each of *count* with each other."""
    src, dst = np.divmod(np.arange(count * count), max(count, 1))
    return src[src != dst], dst[src != dst]


class DragonflyFabric:
    """Groups of switches: all to all inside a group, and *global_links* cables between every two groups.

    Global cable c between groups a and b ends at a switch of each that depends on all three, so that gateways
    are spread over the group. Paths are minimal: to the gateway, across, and on. Adaptive routing is one
    cable with the bandwidth of all between two groups, ending at one gateway.
    """

    def __init__(
        self,
        ports: Ports,
        *,
        nodes_per_switch: int,
        switches_per_group: int,
        bandwidth_bytes_per_s: float,
        global_bytes_per_s: float,
        global_links: int,
        adaptive: bool,
        switch_latency_s: float,
    ) -> None:
        self.switch_latency_s = switch_latency_s
        self._per_switch = nodes_per_switch
        used = -(-ports.num_hosts // nodes_per_switch)
        size = self._size = min(switches_per_group, used)
        groups = self._groups = -(-used // size)
        self._global_links = 1 if adaptive else global_links
        self.switches = [(f"group{i // size}/switch{i % size}", "switch") for i in range(groups * size)]
        inside, across = _pairs(size), _pairs(groups)
        first = np.repeat(np.arange(groups) * size, len(inside[0]))
        self._global_base = len(first)
        a, b = (np.repeat(end, self._global_links) for end in across)
        c = np.tile(np.arange(self._global_links), len(across[0]))
        src = [first + np.tile(inside[0], groups), self._gateway(a, b, c)]
        dst = [first + np.tile(inside[1], groups), self._gateway(b, a, c)]
        local = np.full(len(first), float(bandwidth_bytes_per_s))
        far = np.full(len(a), global_bytes_per_s / self._global_links)
        self.cables = Cables(np.concatenate(src), np.concatenate(dst), np.concatenate([local, far]))

    def _gateway(self, group: Any, other: Any, cable: Any) -> Any:
        """Numbers, or arrays of them."""
        turn = (other - (other > group)) * self._global_links + cable
        return group * self._size + turn % self._size

    def _local(self, src: int, dst: int) -> tuple[int, ...]:
        if src == dst:
            return ()
        size = self._size
        i, j = src % size, dst % size
        return (src // size * size * (size - 1) + i * (size - 1) + j - (j > i),)

    def attach(self, host: Any, nic: Any) -> Any:
        """All NICs of a host on one switch."""
        return host // self._per_switch

    def path(self, src: int, dst: int, key: int) -> tuple[int, ...]:
        """Inside the group, or over a gateway."""
        a, b = src // self._size, dst // self._size
        if a == b:
            return self._local(src, dst)
        c = key % self._global_links
        position = a * (self._groups - 1) + b - (b > a)
        across = self._global_base + position * self._global_links + c
        return (
            *self._local(src, self._gateway(a, b, c)),
            across,
            *self._local(self._gateway(b, a, c), dst),
        )
