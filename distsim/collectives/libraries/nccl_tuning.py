"""NCCL's own cost model, which decides between its algorithms and protocols.

Source: NVIDIA/nccl, src/graph/tuning.cc of v2.30.7 (commit 5067397); times in us, bandwidths in GB/s, as
there. This is what NCCL *believes*, which chooses; what a choice then costs is in `nccl_timing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["ALGORITHMS", "PROTOCOLS", "Candidate", "Machine", "candidates"]

PROTOCOLS = ("LL", "LL128", "Simple")
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")

_BASE_US = {"Tree": (6.8, 14.0, 8.4), "Ring": (6.6, 14.0, 8.4), "PAT": (8.0, 8.0, 8.0)}
_NVLINK_US = {
    "Tree": (0.6, 1.25, 4.0),
    "Ring": (0.6, 1.9, 3.4),
    "NVLS": (0.0, 0.0, 25.0),
    "NVLSTree": (0.0, 0.0, 25.0),
    "PAT": (0.0, 0.0, 4.0),
}
_PCI_US = {"Tree": (1.0, 1.9, 4.0), "Ring": (1.0, 2.5, 5.7), "PAT": (0.0, 0.0, 4.0)}
_NET_US = {
    "Tree": (5.0, 8.5, 14.0),
    "Ring": (2.7, 4.0, 14.0),
    "NVLS": (0.0, 0.0, 18.0),
    "NVLSTree": (0.0, 0.0, 20.9),
    "PAT": (0.0, 0.0, 14.0),
}

# Index by generation: Volta 0, Ampere 1, Hopper 2, Blackwell 3; three values for 1 node, 2 nodes, more.
_LL_MAX = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0))
_RING_LL128 = ((20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (36.7, 36.7, 36.7), (40.0, 40.0, 40.0))
_TREE_LL128 = ((20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (36.7, 36.7, 29.0), (55.6, 31.67, 20.0))
_TREE_SIMPLE = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))
_NVLS_TREE = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (0.0, 57.7, 45.5), (0.0, 96.0, 80.0))
_NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)

_TREE_CORRECTION = {
    "LL": (
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.7,
        0.7,
        0.7,
        0.7,
        0.6,
        0.5,
        0.4,
        0.4,
        0.5,
        0.6,
        0.7,
        0.8,
        0.9,
        1,
        1,
        1,
        1,
        1,
    ),
    "LL128": (
        1,
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.8,
        0.8,
        0.7,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.8,
        0.9,
        0.9,
        0.9,
        0.9,
        1,
        1,
        1,
    ),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
    ),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What the tuning reads of a group and its machine."""

    num_ranks: int
    num_nodes: int
    """NVLink domains count as one node, as in NCCL with MNNVL."""
    generation: int
    """0 Volta, 1 Ampere, 2 Hopper, 3 Blackwell."""
    intra: str
    """nvlink or pci."""
    intra_gbps: float
    """Of a ring inside a node, over all channels."""
    inter_gbps: float
    """Of a ring between nodes, over all channels."""
    channels: int
    nvls: bool
    nvls_channels: int
    ll128: bool
    amd: bool
    collnet: bool
    version: tuple[int, int] = (2, 30)
    """Of NCCL: major and minor."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One algorithm with one protocol. *believed_us* is NCCL's estimate; None where it is ruled out, and
    *why* says so."""

    algo: str
    proto: str
    believed_us: float | None
    why: str


def candidates(op: str, nbytes: float, machine: Machine) -> list[Candidate]:
    """Every algorithm and protocol with NCCL's estimate for one collective."""
    found: list[Candidate] = []
    for algo in ALGORITHMS:
        for index, proto in enumerate(PROTOCOLS):
            why = _excluded(op, algo, proto, machine)
            if why:
                found.append(Candidate(algo, proto, None, why))
                continue
            bandwidth, latency = _bandwidth(op, algo, index, machine), _latency(op, algo, index, machine)
            if bandwidth <= 0:
                found.append(Candidate(algo, proto, None, "no link of this machine carries it"))
                continue
            if algo == "Tree":
                bandwidth *= _correction(proto, nbytes)
            if algo == "Ring" and proto == "Simple" and machine.num_nodes > 1 and op == "all_reduce":
                if nbytes / (machine.channels * machine.num_ranks) >= 64:
                    latency *= 1.9 if machine.generation < 1 else 1.4
            found.append(Candidate(algo, proto, latency + nbytes / (1000 * bandwidth), "allowed"))
    return found


def _correction(proto: str, nbytes: float) -> float:
    place = int(math.log2(max(nbytes, 1) / 64)) if nbytes >= 64 else 0
    table = _TREE_CORRECTION[proto]
    return table[place] if place < len(table) else 1.0


_SINCE = {"NVLS": (2, 17), "NVLSTree": (2, 18), "PAT": (2, 23)}
"""The release that brought an algorithm (NCCL release notes)."""


def _excluded(op: str, algo: str, proto: str, machine: Machine) -> str:
    since = _SINCE.get(algo)
    if since is not None and machine.version < since:
        return f"{algo} came with NCCL {since[0]}.{since[1]}"
    if algo.startswith("CollNet"):
        return (
            "no CollNet plugin in this cluster" if not machine.collnet else "not modelled: NVLS or Tree stands for it"
        )
    if op in ("broadcast", "reduce") and algo != "Ring":
        return f"{op} has a ring only"
    if algo in ("Tree", "NVLSTree") and op != "all_reduce":
        return f"{op} has no tree"
    if algo in ("NVLS", "NVLSTree") and not machine.nvls:
        return "no NVLink SHARP here"
    if algo in ("NVLS", "NVLSTree", "PAT") and proto != "Simple":
        return f"{algo} is Simple only"
    if algo in ("NVLS", "NVLSTree") and machine.num_ranks <= 2:
        return "NVLS wants more than 2 ranks"
    if algo == "NVLS" and machine.num_nodes > 1 and not machine.collnet:
        return "NVLS between nodes needs CollNet"
    if algo == "NVLSTree" and machine.num_nodes == 1:
        return "one node needs no NVLSTree"
    if algo == "PAT":
        if op not in ("all_gather", "reduce_scatter"):
            return f"{op} has no PAT"
        if machine.num_ranks > machine.num_nodes or machine.num_nodes == 1:
            return "PAT wants one GPU a node"
    if proto == "LL128" and not machine.ll128:
        return "LL128 is not safe on this path"
    return ""


def _column(machine: Machine) -> int:
    return min(machine.num_nodes, 3) - 1


def _bandwidth(op: str, algo: str, index: int, machine: Machine) -> float:
    generation, column, channels = machine.generation, _column(machine), machine.channels
    raw = machine.intra_gbps if machine.num_nodes <= 2 else machine.inter_gbps
    if machine.num_nodes == 2:
        # On two nodes a tree's NICs carry each byte once, a ring's twice: NCCL reckons with the inner
        # bandwidth there.
        raw = min(machine.intra_gbps, machine.inter_gbps * (2.0 if algo == "Tree" else 1.0))
    ll_max = _LL_MAX[generation][0]
    if machine.num_nodes > 1:
        ll_max = _LL_MAX[generation][2 if machine.amd and machine.num_nodes > 2 else 1]
    bandwidth = raw
    if algo == "Ring":
        if index == 0:
            bandwidth = min(ll_max, raw * 0.5)
        elif index == 1:
            bandwidth = min(raw * 0.92, channels * _RING_LL128[generation][column])
    elif algo == "Tree":
        bandwidth = min(raw * 0.92, channels * _TREE_SIMPLE[generation][column])
        if index == 0:
            bandwidth = min(raw / 3.8, ll_max)
        elif index == 1:
            factor = 7.0 / 9.0 if machine.num_nodes == 1 else 120.0 / 128.0
            bandwidth = min(raw * factor, channels * _TREE_LL128[generation][column])
        bandwidth *= 0.85 if machine.num_nodes > 1 and index == 2 and machine.generation < 1 else 1.0
    elif algo == "NVLS":
        many = machine.nvls_channels
        bandwidth = machine.intra_gbps * _NVLS_EFFICIENCY[generation] * (many - 1) / many
        per_node = machine.num_ranks / machine.num_nodes
        bandwidth *= 2.0 if op == "all_reduce" else (per_node - 1) / per_node
    elif algo == "NVLSTree":
        many = machine.nvls_channels
        inside = machine.intra_gbps * _NVLS_EFFICIENCY[generation] * (many - 1) / many
        bandwidth = min(inside * 2.0, machine.inter_gbps * (2.0 if machine.num_nodes == 2 else 1.0))
        bandwidth = min(bandwidth, machine.nvls_channels * _NVLS_TREE[generation][column])
    elif algo == "PAT":
        bandwidth = raw * 0.75
    if algo in ("Ring", "NVLS", "NVLSTree"):
        return bandwidth * machine.num_ranks / _steps(op, machine.num_ranks)
    return bandwidth * 0.5


def _steps(op: str, size: int) -> int:
    if op == "all_reduce":
        return 2 * (size - 1)
    return size - 1 if op in ("all_gather", "reduce_scatter") else size


def _latency(op: str, algo: str, index: int, machine: Machine) -> float:
    base = _BASE_US.get(algo, (0.0, 0.0, 0.0))[index]
    inside = (_NVLINK_US if machine.intra == "nvlink" else _PCI_US).get(algo, (0.0, 0.0, 0.0))[index]
    between = _NET_US.get(algo, (0.0, 0.0, 0.0))[index]
    nodes, size = machine.num_nodes, machine.num_ranks
    per_node = max(1.0, size / nodes)
    overhead = (2.0 if machine.amd else 1.0) * (3.0 if index == 2 else 1.0)
    if algo == "Ring":
        rounds = 0 if nodes == 1 else (2 * (nodes - 1) if op == "all_reduce" else nodes - 1)
        steps = 2 * (size - 1) if op == "all_reduce" else size - 1
        if per_node <= 1:
            between = _NET_US["Tree"][index]
        step = max(inside, overhead) if nodes > 1 else inside
        return base + (steps - rounds) * step + rounds * between
    if algo == "Tree":
        return base + 2 * ((per_node - 1) * inside + math.log2(nodes) * between)
    if algo == "NVLS":
        return inside + (between if nodes > 1 else 0.0)
    if algo == "NVLSTree":
        return inside + 2 * math.log2(nodes) * between
    return base + math.log2(nodes) * between / 3.5 + 2.8 * size
