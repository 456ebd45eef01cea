"""NCCL: which algorithm and protocol it takes, and what that costs."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from distsim.cluster import Cluster
from distsim.collectives.direct import (
    all_to_all_loads,
    direct_messages,
    direct_phase,
    rooted_loads,
    split_loads,
)
from distsim.collectives.gloo import _next_loads
from distsim.collectives.group import Group
from distsim.collectives.nccl_tuning import ALGORITHMS, PROTOCOLS, Candidate, Machine, candidates
from distsim.collectives.nvls import nvls_phase, nvls_tree_phase
from distsim.collectives.plan import Cost, Plan
from distsim.collectives.ring import Shape, ring_messages, ring_phase
from distsim.collectives.tree import tree_messages, tree_phase
from distsim.errors import UsageError

__all__ = ["NcclSelector"]

Splits = tuple[tuple[int, ...], ...] | None

_LAUNCH_S = 6e-6


class NcclSelector:
    """NCCL of one version on one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        capacity: NDArray[np.float64],
        *,
        algo: str | None,
        proto: str | None,
        version: str,
    ) -> None:
        self.cluster = cluster
        self.capacity = capacity
        self.version = version
        self.algo = _named("an algorithm", algo, ALGORITHMS) if version != "ideal" else None
        self.proto = _named("a protocol", proto, PROTOCOLS) if version != "ideal" else None

    def machine(self, group: Group) -> Machine:
        """What NCCL's tuning reads of *group*."""
        found: Machine = group.cached("nccl machine", lambda: self._machine(group))
        return found

    def _machine(self, group: Group) -> Machine:
        node, nccl = self.cluster.node, self.cluster.nccl
        generation = {7: 0, 8: 1, 9: 2}.get(
            nccl.compute_capability // 10, 3 if nccl.compute_capability >= 100 else 0
        )
        nvlink = node.nvlink != "none"
        intra = (node.nvlink_bytes_per_s if nvlink else node.pcie_bytes_per_s) / 1e9
        inter = len(group.shared_rails) * node.nic_bytes_per_s / 1e9 if len(group.domains) > 1 else intra
        channels = 24 if generation == 2 else (24 if generation == 1 else 32)
        if len(group.domains) > 1:
            channels = 16
        return Machine(
            num_ranks=group.size,
            num_nodes=len(group.domains),
            generation=generation,
            intra="nvlink" if nvlink else "pci",
            intra_gbps=intra,
            inter_gbps=min(inter, intra) if group.per_node > 1 else inter,
            channels=channels,
            nvls=node.nvls and group.per_node > 1,
            nvls_channels=16 if generation == 2 else 24,
            ll128=nvlink and generation >= 1,
            amd=nccl.cpu_vendor == "amd",
            collnet=nccl.collnet,
        )

    def compile(self, group: Group, op: str, nbytes: float, root: int, splits: Splits) -> Plan:
        """The plan of NCCL's choice. *nbytes* as in `Transfer`."""
        if group.size == 1:
            return Plan("none", "none", 0, _LAUNCH_S)
        if op in ("all_to_all", "gather", "scatter", "sendrecv"):
            return self._direct(group, op, nbytes, root, splits)
        if op == "barrier":
            op, nbytes = "all_reduce", 4
        best = self._choose(group, op, nbytes)
        return self._plan(group, op, nbytes, best.algo, best.proto)

    def _choose(self, group: Group, op: str, nbytes: float) -> Candidate:
        every = candidates(op, nbytes, self.machine(group))
        allowed = [one for one in every if one.believed_us is not None]
        forced = [one for one in allowed if self.algo in (None, one.algo) and self.proto in (None, one.proto)]
        return min(forced or allowed, key=lambda one: one.believed_us or 0.0)

    def explain(
        self, group: Group, op: str, nbytes: float, root: int, splits: Splits
    ) -> list[tuple[str, str, int, float | None, str, bool]]:
        """(algo, proto, channels, predicted_s, why, chosen) of every way."""
        if op in ("all_to_all", "gather", "scatter", "sendrecv") or group.size == 1:
            plan = self.compile(group, op, nbytes, root, splits)
            return [(plan.algo, plan.proto, plan.channels, plan.alone_s(self.capacity), "the only way", True)]
        if op == "barrier":
            op, nbytes = "all_reduce", 4
        best = self._choose(group, op, nbytes)
        rows: list[tuple[str, str, int, float | None, str, bool]] = []
        for one in candidates(op, nbytes, self.machine(group)):
            if one.believed_us is None:
                rows.append((one.algo, one.proto, 0, None, one.why, False))
                continue
            plan = self._plan(group, op, nbytes, one.algo, one.proto)
            chosen = one == best
            why = f"NCCL's model says {one.believed_us:.1f} us" + (", the least" if chosen else "")
            rows.append((one.algo, one.proto, plan.channels, plan.alone_s(self.capacity), why, chosen))
        return rows

    def cost(self, group: Group, algo: str, proto: str) -> Cost:
        """What *proto* adds to the links."""
        machine = self.machine(group)
        hop = {"LL": (0.6e-6, 3.0e-6), "LL128": (1.5e-6, 5.0e-6), "Simple": (3.6e-6, 14e-6)}[proto]
        per_channel = {"LL": 12e9, "LL128": 36e9 if machine.generation >= 2 else 20e9, "Simple": 40e9}[proto]
        wire = {"LL": 2.0, "LL128": 128 / 120, "Simple": 1.01}[proto]
        return Cost(wire, machine.channels * per_channel, hop[0], hop[1])

    def _plan(self, group: Group, op: str, nbytes: float, algo: str, proto: str) -> Plan:
        channels = self.machine(group).channels
        cost = self.cost(group, algo, proto)
        if algo == "Tree":
            return Plan(
                algo,
                proto,
                channels,
                _LAUNCH_S,
                (tree_phase(group, nbytes, cost),),
                lambda: tree_messages(group, nbytes, cost),
            )
        if algo == "NVLS":
            return Plan(algo, proto, channels, _LAUNCH_S, (nvls_phase(group, op, nbytes, cost),))
        if algo == "NVLSTree":
            return Plan(algo, proto, channels, _LAUNCH_S, (nvls_tree_phase(group, nbytes, cost),))
        shape = Shape.of(op, group.size, nbytes)
        return Plan(
            algo,
            proto,
            channels,
            _LAUNCH_S,
            (ring_phase(group, shape, cost),),
            lambda: ring_messages(group, shape, cost),
        )

    def send(self, group: Group, nbytes: float) -> Plan:
        """A point-to-point transfer from member 0 to member 1."""
        cost = self.cost(group, "P2P", "Simple")
        phase = direct_phase(group, group.loads([(group.route(0, 1), 1.0)]), nbytes, cost)
        return Plan("SendRecv", "Simple", 1, _LAUNCH_S, (phase,))

    def _direct(self, group: Group, op: str, nbytes: float, root: int, splits: Splits) -> Plan:
        cost = self.cost(group, "P2P", "Simple")
        size = group.size
        if op == "sendrecv":
            phase = direct_phase(group, _next_loads(group), nbytes, cost)
            return Plan("SendRecv", "Simple", 1, _LAUNCH_S, (phase,))
        if op in ("gather", "scatter"):
            loads = rooted_loads(group, root, op == "gather")
            return Plan("SendRecv", "Simple", 1, _LAUNCH_S, (direct_phase(group, loads, nbytes, cost),))
        if splits is None:
            share = nbytes / size
            pairs = {(s, d): share for s in range(size) for d in range(size) if s != d} if size <= 128 else {}
            phase = direct_phase(group, all_to_all_loads(group), share, cost)
        else:
            pairs = {
                (s, d): float(b) for s, row in enumerate(splits) for d, b in enumerate(row) if b and s != d
            }
            largest = max(pairs.values(), default=0.0)
            phase = direct_phase(group, split_loads(group, pairs, largest), largest, cost)
        messages = (lambda: direct_messages(group, pairs, cost)) if pairs else None
        return Plan("SendRecv", "Simple", 1, _LAUNCH_S, (phase,), messages)


def _named(what: str, given: str | None, known: tuple[str, ...]) -> str | None:
    if given is None:
        return None
    for name in known:
        if name.lower() == given.lower().replace("_", "").replace("-", ""):
            return name
    raise UsageError(f"expected {what} of NCCL ({', '.join(known)}), got {given!r}")


_ = math
