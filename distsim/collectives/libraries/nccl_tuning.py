"""NCCL's own cost model, which decides between its algorithms and protocols.

Source: NVIDIA/nccl, src/graph/tuning.cc (ncclTopoTuneModel, ncclTopoGetAlgoTime); its figures by release are in
`nccl_versions`. Times in us, bandwidths in GB/s, as there. This is what NCCL *believes*, which chooses; what a choice
then costs is in `nccl_timing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distsim.collectives.libraries.nccl_versions import tuning_of

__all__ = ["ALGORITHMS", "PROTOCOLS", "Candidate", "Machine", "candidates", "steps_of"]

PROTOCOLS = ("LL", "LL128", "Simple")
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")

# Index by generation: Volta 0, Ampere 1, Hopper 2, Blackwell 3.
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
_CORRECTED = 23
"""Powers of two that are: up to 256 MiB."""


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
    """NVLinks of one GPU together, or the slowest PCIe hop of a ring."""
    graph_channels: int
    """Channels that NCCL's search finds; each carries *ring_gbps* in a ring and *tree_gbps* in a tree."""
    ring_gbps: float
    tree_gbps: float
    channels: int
    """Channels that carry data: two for each that the search finds."""
    nvls: bool
    nvls_channels: int
    net_us: float
    """What the network plugin says of its latency: 0 but for EFA (aws-ofi-nccl)."""
    ll128: bool
    amd: bool
    collnet: bool
    simple_tree: bool = False
    """A NIC is near one GPU only: from Hopper on the search then takes a tree whose two children and parent all go
    through that one before it looks further (search.cc, "Try a simpler tree"), which NCCL reckons with 0.85 of the
    bandwidth (NCCL_TOPO_PATTERN_TREE)."""
    x86: bool = True
    version: tuple[int, int] = (2, 30)
    """Of NCCL: major and minor."""
    rccl: int = 0
    """RCCL's tuning model; 0 where the library is NCCL, or an RCCL of which NCCL's model stands."""
    nics: int = 1
    """Those that the ranks of a node use."""
    slot_bytes: int = 1 << 19
    """Of the eight that a channel's buffer of Simple has."""


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
            if algo == "Tree" or (algo == "NVLSTree" and _corrects_nvls(machine)):
                bandwidth *= _correction(proto, nbytes)
            if algo == "Ring" and proto == "Simple" and machine.num_nodes > 1 and op == "all_reduce":
                if nbytes / (machine.channels * machine.num_ranks) >= 64:
                    latency *= tuning_of(machine.version).plateau[min(machine.generation, 2)]
            found.append(Candidate(algo, proto, latency + nbytes / (1000 * bandwidth), "allowed"))
    return found


def _correction(proto: str, nbytes: float) -> float:
    place = int(math.log2(max(nbytes, 1) / 64)) if nbytes >= 64 else 0
    return _TREE_CORRECTION[proto][place] if place < _CORRECTED else 1.0


def _corrects_nvls(machine: Machine) -> bool:
    """From 2.29 on NVLSTree is corrected as trees are, on Blackwell beside x86 (ncclTopoGetAlgoTime)."""
    return machine.version >= (2, 29) and machine.generation >= 3 and machine.x86


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
    tuning = tuning_of(machine.version)
    generation, column, channels = machine.generation, _column(machine), machine.graph_channels
    many = machine.num_nodes > 1
    ll_max = tuning.ll_max[(1 if machine.amd else 0) if many else generation][column]
    bandwidth = channels * machine.ring_gbps
    if algo == "Ring":
        if index == 0:
            reduces = op in ("all_reduce", "reduce")
            bandwidth = min(ll_max, bandwidth * (tuning.ring_ll_share if many or reduces else tuning.ring_ll_inside))
        elif index == 1:
            bandwidth = min(bandwidth * 0.92, channels * tuning.ring_ll128[generation][column])
    elif algo == "Tree":
        bandwidth = min(channels * machine.tree_gbps * 0.92, channels * tuning.tree_simple[generation][column])
        if index == 0:
            bandwidth = min(bandwidth / 3.8, ll_max)
        elif index == 1:
            factor = 120.0 / 128.0 if many else 7.0 / 9.0
            bandwidth = min(bandwidth * factor, channels * tuning.tree_ll128[generation][column])
        bandwidth *= 0.85 if machine.simple_tree and many else 1.0
    elif algo in ("NVLS", "NVLSTree"):
        bandwidth = _nvls_bandwidth(op, algo, machine)
        if tuning.nvls_tree is None:
            return bandwidth * 5 / 6
    elif algo == "PAT":
        bandwidth *= tuning.pat_share
    if algo in ("Ring", "NVLS", "NVLSTree"):
        return bandwidth * machine.num_ranks / steps_of(op, machine.num_ranks)
    if algo == "PAT":
        return bandwidth
    return bandwidth * 0.5


def _nvls_bandwidth(op: str, algo: str, machine: Machine) -> float:
    """Over all heads (a GPU each); from 2.28 on with what NVLS is known to give, before as a ring."""
    caps = tuning_of(machine.version).nvls_tree
    inside, between = machine.intra_gbps, machine.graph_channels * machine.ring_gbps
    if caps is None:
        if machine.num_nodes == 1:
            return inside
        return min(inside, between * (0.5 if algo == "NVLSTree" and machine.num_nodes > 2 else 1.0))
    heads, per_node = machine.nvls_channels, machine.num_ranks / machine.num_nodes
    inside *= _NVLS_EFFICIENCY[machine.generation] * (heads - 1) / heads
    inside *= 2.0 if op == "all_reduce" else (per_node - 1) / per_node
    if machine.num_nodes == 1:
        return inside
    if algo == "NVLS":
        return min(inside, between)
    cap = machine.graph_channels * caps[machine.generation][_column(machine)]
    return min(inside, between * (2.0 if machine.num_nodes == 2 else 1.0), cap)


def steps_of(op: str, size: int) -> int:
    """How often a ring of *size* passes a piece on."""
    if op == "all_reduce":
        return 2 * (size - 1)
    return size - 1 if op in ("all_gather", "reduce_scatter") else size


def _latency(op: str, algo: str, index: int, machine: Machine) -> float:
    tuning = tuning_of(machine.version)
    base = tuning.base_us.get(algo, (0.0, 0.0, 0.0))[index]
    inside = (tuning.nvlink_us if machine.intra == "nvlink" else tuning.pci_us).get(algo, (0.0, 0.0, 0.0))[index]
    nodes, size = machine.num_nodes, machine.num_ranks
    per_node = max(1.0, size / nodes)
    exposed = algo == "Ring" and per_node <= 1 and machine.version >= (2, 23)
    between = tuning.net_us.get("Tree" if exposed else algo, (0.0, 0.0, 0.0))[index]
    between += machine.net_us * (2.0 if index == 2 else 1.0)
    overhead = (2.0 if machine.amd else 1.0) * (3.0 if index == 2 else 1.0)
    depth = int(math.log2(nodes))
    if algo == "Ring":
        if op in ("broadcast", "reduce"):
            return base + (between if nodes > 1 else inside)
        rounds = 0 if nodes == 1 else (2 * (nodes - 1) + tuning.extra_inter_steps if op == "all_reduce" else nodes - 1)
        step = max(inside, overhead) if nodes > 1 else inside
        return base + (steps_of(op, size) - rounds) * step + rounds * between
    if algo == "Tree":
        return base + 2 * ((per_node - 1) * inside + depth * between)
    if algo == "NVLS":
        return inside + (between if nodes > 1 else 0.0) + (base if machine.version < (2, 19) else 0.0)
    if algo == "NVLSTree":
        return base + inside + 2 * depth * between
    return base + depth * between / 3.5 + 2.8 * size
