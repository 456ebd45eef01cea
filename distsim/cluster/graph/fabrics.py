"""Networks that connect hosts: trees of switches, torus, ring, full mesh, dragonfly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# -- What connects hosts: switches, the links between them, and the way from one to another.
#
# A fabric knows nothing of hosts but how many there are, how many NICs each has and how fast one is. Paths are
# computed from the structure (up and down a tree, dimension by dimension in a grid), never searched for.


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports that a fabric connects."""

    num_hosts: int
    num_nics: int
    nic_bytes_per_s: float


@dataclass(frozen=True, eq=False, slots=True)
class Cables:
    """Directed links between switches as arrays with one element per link; ends are positions in `Fabric.switches`."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    bandwidth_bytes_per_s: NDArray[np.float64]


class Fabric(Protocol):
    """The interface of every fabric."""

    @property
    def switches(self) -> Sequence[tuple[str, str]]:
        """Return the name and kind (leaf, spine or switch) of each switch."""

    @property
    def cables(self) -> Cables:
        """Return every directed link between switches; their latency is `switch_latency_s`."""

    @property
    def switch_latency_s(self) -> float:
        """Return the latency of a switch from port to port, in seconds."""

    def attach(self, host: Any, nic: Any) -> Any:
        """Return the switch to which a NIC is connected. Arguments are numbers or arrays."""

    def path(self, src: int, dst: int, key: int) -> tuple[int, ...]:
        """Return the cables from switch *src* to switch *dst*; *key* chooses among equal paths."""


def mix(*values: int) -> int:
    """Return a 64-bit hash of some integers that is the same on every machine (the finaliser of splitmix64)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ value) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 27
        state = state * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def _both_ways(low: NDArray[np.int64], high: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ends of a cable up and a cable down between each pair of switches."""
    return np.stack([low, high], axis=1).ravel(), np.stack([high, low], axis=1).ravel()


class TreeFabric:
    """Leaves, spines in pods, and cores above the pods; a star is one leaf, and two levels are one pod.

    *rails* is the number of leaves in a unit of *nodes_per_leaf* hosts: NIC k is connected to leaf k % rails. A leaf
    has one cable to each spine of its pod, and a spine one to each core; together they have the bandwidth from below
    divided by the oversubscription. Adaptive routing is modelled as one spine (and one core) with the bandwidth of
    all.
    """

    def __init__(
        self,
        ports: Ports,
        *,
        nodes_per_leaf: int,
        spines: int,
        rails: int = 1,
        oversubscription: float = 1.0,
        leaves_per_pod: int | None = None,
        cores: int = 0,
        core_oversubscription: float = 1.0,
        adaptive: bool = False,
        switch_latency_s: float = 0.0,
    ) -> None:
        self.switch_latency_s = switch_latency_s
        self._nodes_per_leaf, self._rails = nodes_per_leaf, rails
        num_leaves = -(-ports.num_hosts // nodes_per_leaf) * rails
        spines, cores = (min(spines, 1), min(cores, 1)) if adaptive else (spines, cores)
        if num_leaves == 1:
            spines = cores = 0
        self._leaves_per_pod = leaves_per_pod or num_leaves
        num_pods = -(-num_leaves // self._leaves_per_pod)
        if num_pods == 1:
            cores = 0
        self._spines, self._cores = spines, cores
        self.switches: list[tuple[str, str]] = [(f"leaf{i}", "leaf") for i in range(num_leaves)]
        self.switches += [(f"spine{i}", "spine") for i in range(num_pods * spines)]
        self.switches += [(f"core{i}", "switch") for i in range(cores)]
        leaf_up = nodes_per_leaf * ports.num_nics / rails * ports.nic_bytes_per_s / oversubscription
        leaf, spine = np.divmod(np.arange(num_leaves * spines), max(spines, 1))
        above = num_leaves + leaf // self._leaves_per_pod * spines + spine
        rates = np.full(2 * len(leaf), leaf_up / max(spines, 1))
        src, dst = _both_ways(leaf, above)
        self._core_base = len(src)
        if cores:
            spine_up = leaf_up / spines * self._leaves_per_pod / core_oversubscription
            spine, core = np.divmod(np.arange(num_pods * spines * cores), cores)
            ends = _both_ways(num_leaves + spine, num_leaves + num_pods * spines + core)
            src, dst = np.concatenate([src, ends[0]]), np.concatenate([dst, ends[1]])
            rates = np.concatenate([rates, np.full(2 * len(core), spine_up / cores)])
        self.cables = Cables(src, dst, rates)

    def attach(self, host: Any, nic: Any) -> Any:
        """Return the leaf of the host's unit and the NIC's rail."""
        return host // self._nodes_per_leaf * self._rails + nic % self._rails

    def path(self, src: int, dst: int, key: int) -> tuple[int, ...]:
        """Return the path up to a common spine or core and down again."""
        if src == dst:
            return ()
        spines, cores = self._spines, self._cores
        pod, other = src // self._leaves_per_pod, dst // self._leaves_per_pod
        spine = key % spines
        if pod == other:
            return (src * spines + spine) * 2, (dst * spines + spine) * 2 + 1
        core, down = key // spines % cores, key // (spines * cores) % spines
        return (
            (src * spines + spine) * 2,
            self._core_base + ((pod * spines + spine) * cores + core) * 2,
            self._core_base + ((other * spines + down) * cores + core) * 2 + 1,
            (dst * spines + down) * 2 + 1,
        )

    def paths(self, src: NDArray[np.int64], dst: NDArray[np.int64], key: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return `path` of many pairs, one row each, padded with -1."""
        rows = np.full((len(src), 4), -1, dtype=np.int64)
        spines, cores = self._spines, self._cores
        away = src != dst
        if not away.any():
            return rows
        pod, other = src // self._leaves_per_pod, dst // self._leaves_per_pod
        spine = (key % np.uint64(spines)).astype(np.int64)
        rows[:, 0] = np.where(away, (src * spines + spine) * 2, -1)
        down = spine
        if cores:
            far = away & (pod != other)
            core = (key // np.uint64(spines) % np.uint64(cores)).astype(np.int64)
            down = np.where(far, (key // np.uint64(spines * cores) % np.uint64(spines)).astype(np.int64), spine)
            rows[:, 1] = np.where(far, self._core_base + ((pod * spines + spine) * cores + core) * 2, -1)
            rows[:, 2] = np.where(far, self._core_base + ((other * spines + down) * cores + core) * 2 + 1, -1)
        rows[:, 3] = np.where(away, (dst * spines + down) * 2 + 1, -1)
        return rows


class RailFabric:
    """One switch per rail, connected to the NIC of that rail in every host; no cables between the switches.

    Source: Wang et al., "Rail-only" networks (arXiv:2307.12169).
    """

    def __init__(self, ports: Ports, switch_latency_s: float) -> None:
        self.switch_latency_s = switch_latency_s
        self.switches: list[tuple[str, str]] = [(f"rail{i}", "leaf") for i in range(ports.num_nics)]
        none = np.zeros(0, dtype=np.int64)
        self.cables = Cables(none, none, np.zeros(0))

    def attach(self, host: Any, nic: Any) -> Any:
        """Return the switch of the NIC's rail."""
        return nic + host * 0

    def path(self, src: int, dst: int, key: int) -> tuple[int, ...]:
        """Return no cables: both ends of a route are on one rail (`HostsOnFabric.route`)."""
        assert src == dst, "a route over a rail-only fabric stays on its rail"
        return ()


# -- Fabrics without a hierarchy of switches: torus, ring, full mesh, dragonfly. A router a host, or a switch
# for several.


class TorusFabric:
    """Routers in a grid with wraparound, one per host; a ring is a torus of one dimension.

    Paths go dimension by dimension, in the shorter direction (on a tie *key* decides). If a dimension has two routers,
    they have one cable in each direction, not two.
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
        """Return the host's own router."""
        return host

    def path(self, src: int, dst: int, key: int) -> tuple[int, ...]:
        """Return the route that crosses one dimension after the other."""
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
    """One router per host, each with a cable to every other router."""

    def __init__(self, ports: Ports, bandwidth_bytes_per_s: float | None, switch_latency_s: float) -> None:
        self.switch_latency_s = switch_latency_s
        count = self._count = ports.num_hosts
        self.switches = [(f"router{i}", "switch") for i in range(count)]
        rate = bandwidth_bytes_per_s or ports.num_nics * ports.nic_bytes_per_s / max(1, count - 1)
        src, dst = _pairs(count)
        self.cables = Cables(src, dst, np.full(len(src), float(rate)))

    def attach(self, host: Any, nic: Any) -> Any:
        """Return the host's own router."""
        return host

    def path(self, src: int, dst: int, key: int) -> tuple[int, ...]:
        """Return the cable between the two routers."""
        return (src * (self._count - 1) + dst - (dst > src),) if src != dst else ()


def _pairs(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all pairs of *count* items."""
    src, dst = np.divmod(np.arange(count * count), max(count, 1))
    return src[src != dst], dst[src != dst]


class DragonflyFabric:
    """Groups of switches: all-to-all inside a group, and *global_links* cables between every two groups.

    The switches at which global cable c of groups a and b ends depend on a, b and c, so that gateways are spread over
    a group. Paths are minimal: to the gateway, across, and on. Adaptive routing is modelled as one cable with the
    bandwidth of all between two groups, ending at one gateway.
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
        """Return the switch of *group* at which a *cable* to *other* ends. Arguments are numbers or arrays."""
        turn = (other - (other > group)) * self._global_links + cable
        return group * self._size + turn % self._size

    def _local(self, src: int, dst: int) -> tuple[int, ...]:
        if src == dst:
            return ()
        size = self._size
        i, j = src % size, dst % size
        return (src // size * size * (size - 1) + i * (size - 1) + j - (j > i),)

    def attach(self, host: Any, nic: Any) -> Any:
        """Return the switch of a host, to which all its NICs are connected."""
        return host // self._per_switch

    def path(self, src: int, dst: int, key: int) -> tuple[int, ...]:
        """Return the path inside the group, or over a gateway to the other group."""
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
