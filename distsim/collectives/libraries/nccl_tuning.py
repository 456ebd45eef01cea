"""NCCL's own cost model by release, which decides between its algorithms and protocols."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

# -- The figures of NCCL's own cost model, release by release: what its tuning believed when.
#
# Source: NVIDIA/nccl, src/graph/tuning.cc at the tags v2.16.5-1 to v2.30.3-1 (from 2.30 on also this order of the
# table); times in us, bandwidths in GB/s, as there. Releases without a change of their own are as the one before.

Three = tuple[float, float, float]
"""Values by protocol (LL, LL128, Simple), or by number of nodes (1, 2, more)."""
Rows = tuple[Three, Three, Three, Three]
"""Values by GPU generation: Volta, Ampere, Hopper, Blackwell."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """One release's figures."""

    base_us: Mapping[str, Three]
    nvlink_us: Mapping[str, Three]
    pci_us: Mapping[str, Three]
    net_us: Mapping[str, Three]
    ll_max: Rows
    """Maximum bandwidth of LL, by generation on one node; between nodes row 0 is for Intel and row 1 for AMD."""
    ring_ll128: Rows
    """Maximum bandwidth of one channel, like the next three fields."""
    tree_ll128: Rows
    tree_simple: Rows
    nvls_tree: Rows | None
    """None in releases before 2.28, which computed NVLS differently."""
    ring_ll_inside: float = 0.5
    """LL's share of a ring's bandwidth: on one node where nothing is added up."""
    ring_ll_share: float = 0.5
    """LL's share of a ring's bandwidth in all other cases."""
    pat_share: float = 0.75
    extra_inter_steps: int = 0
    """Additional steps between nodes of a ring's all_reduce: 2 before 2.23, which counted 2 * nodes."""
    plateau: Three = (1.9, 1.4, 1.4)
    """Factor on the latency of a ring: Volta, Ampere, newer."""


_TREE_SLOW = (0.6, 1.25, 28.0)
_RING = (0.6, 1.9, 3.4)
_V218 = Tuning(
    base_us={
        "Tree": (6.8, 14.0, 0.0),
        "Ring": (6.6, 14.0, 8.4),
        "NVLS": (0.0, 0.0, 23.0),
        "NVLSTree": (0.0, 0.0, 23.0),
    },
    nvlink_us={"Tree": (0.6, 1.25, 4.0), "Ring": _RING},
    pci_us={"Tree": (1.0, 1.9, 6.0), "Ring": (1.0, 2.5, 5.7)},
    net_us={"Tree": (5.0, 8.5, 14.0), "Ring": (2.7, 4.0, 14.0), "NVLS": (0.0, 0.0, 18.0), "NVLSTree": (0.0, 0.0, 19.0)},
    ll_max=((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (87.7, 22.5, 19.0), (87.7, 22.5, 19.0)),
    ring_ll128=((20.0,) * 3, (20.0,) * 3, (36.7,) * 3, (36.7,) * 3),
    tree_ll128=((20.0,) * 3, (20.0,) * 3, (36.7, 36.7, 29.0), (36.7, 36.7, 29.0)),
    tree_simple=((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (38.7, 41.4, 36.0)),
    nvls_tree=None,
    ring_ll_inside=1 / 3,
    ring_ll_share=0.25,
    pat_share=0.85,
    extra_inter_steps=2,
)
_V216 = replace(
    _V218,
    base_us={"Tree": (4.4, 4.4, 0.0), "Ring": (3.6, 10.0, 8.4), "NVLS": (0.0, 0.0, 40.0)},
    nvlink_us={"Tree": (0.52, 1.25, 28.0), "Ring": (0.47, 1.9, 3.4)},
    pci_us={"Tree": (1.0, 1.9, 28.0), "Ring": (1.0, 2.5, 5.7)},
    net_us={"Tree": (5.0, 8.5, 28.0), "Ring": (2.7, 4.0, 9.6)},
    plateau=(1.9, 1.9, 1.5),
)
_V219 = replace(
    _V218,
    base_us={"Tree": (6.8, 14.0, 0.0), "Ring": (6.6, 14.0, 8.4)},
    nvlink_us={"Tree": _TREE_SLOW, "Ring": _RING, "NVLS": (0.0, 0.0, 23.0), "NVLSTree": (0.0, 0.0, 23.0)},
    pci_us={"Tree": (1.0, 1.9, 28.0), "Ring": (1.0, 2.5, 5.7)},
    net_us={"Tree": (5.0, 8.5, 28.0), "Ring": (2.7, 4.0, 14.0), "NVLS": (0.0, 0.0, 18.0), "NVLSTree": (0.0, 0.0, 14.0)},
)
_V221 = replace(
    _V219,
    nvlink_us={"Tree": _TREE_SLOW, "Ring": _RING, "NVLS": (0.0, 0.0, 25.0), "NVLSTree": (0.0, 0.0, 25.0)},
    ll_max=((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (141.0, 45.0, 35.0)),
    ring_ll_inside=0.5,
    ring_ll_share=0.5,
)
_V223 = replace(
    _V221,
    base_us={"Tree": (6.8, 14.0, 8.4), "Ring": (6.6, 14.0, 8.4), "PAT": (8.0, 8.0, 8.0)},
    nvlink_us={**_V221.nvlink_us, "Tree": (0.6, 1.25, 4.0), "PAT": (0.0, 0.0, 4.0)},
    pci_us={"Tree": (1.0, 1.9, 4.0), "Ring": (1.0, 2.5, 5.7), "PAT": (0.0, 0.0, 4.0)},
    net_us={**_V221.net_us, "Tree": (5.0, 8.5, 14.0), "PAT": (0.0, 0.0, 14.0)},
    extra_inter_steps=0,
)
_V224 = replace(_V223, pat_share=0.75)
_V225 = replace(
    _V224,
    ll_max=(*_V224.ll_max[:3], (282.0, 90.0, 70.0)),
    ring_ll128=(*_V224.ring_ll128[:3], (73.4,) * 3),
    tree_ll128=(*_V224.tree_ll128[:3], (73.4, 73.4, 58.0)),
    tree_simple=(*_V224.tree_simple[:3], (77.4, 82.8, 72.0)),
)
_V228 = replace(
    _V225,
    net_us={**_V225.net_us, "NVLSTree": (0.0, 0.0, 20.9)},
    ring_ll128=(*_V225.ring_ll128[:3], (73.4, 34.6, 73.4)),
    tree_ll128=(*_V225.tree_ll128[:3], (55.6, 31.67, 20.0)),
    tree_simple=(*_V225.tree_simple[:3], (70.0, 42.8, 24.0)),
    nvls_tree=((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (0.0, 57.7, 45.5), (0.0, 96.0, 43.8)),
)
_V229 = replace(_V228, ring_ll128=(*_V228.ring_ll128[:3], (40.0,) * 3))
_V230 = replace(_V229, nvls_tree=(*(_V229.nvls_tree or ())[:3], (0.0, 96.0, 80.0)))

_TUNING_SINCE = (
    (30, _V230),
    (29, _V229),
    (28, _V228),
    (25, _V225),
    (24, _V224),
    (23, _V223),
    (21, _V221),
    (19, _V219),
    (18, _V218),
    (0, _V216),
)


@cache
def tuning_of(version: tuple[int, int]) -> Tuning:
    """Return the figures of NCCL *version* (major, minor); newer releases than known are as the newest."""
    return next(tuning for since, tuning in _TUNING_SINCE if version >= (2, since))


_KNOWN = ((2, 16), (2, 30))
"""First and last of the releases above."""


def strange_release(version: str) -> str | None:
    """Return a note about an NCCL release that the tuning tables do not cover; None for a covered release."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    first, last = _KNOWN
    if len(numbers) < 2 or first <= numbers <= last:
        return None
    near = last if numbers > last else first
    return (
        f"NCCL {version} is not among the releases whose choices are known ({first[0]}.{first[1]} to "
        f"{last[0]}.{last[1]}): distsim uses the algorithms and protocols of {near[0]}.{near[1]}"
    )


# -- NCCL's own cost model, which decides between its algorithms and protocols.
#
# Source: NVIDIA/nccl, src/graph/tuning.cc (ncclTopoTuneModel, ncclTopoGetAlgoTime); its figures by release are in
# `nccl_versions`. Times in us, bandwidths in GB/s, as there. This is what NCCL *believes*, which chooses; what a choice
# then costs is in `nccl_timing`.

PROTOCOLS = ("LL", "LL128", "Simple")
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")

# Index by generation: Volta 0, Ampere 1, Hopper 2, Blackwell 3.
_NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)

_TREE_CORRECTION = {
    proto: tuple(map(float, row.split()))
    for proto, row in {
        "LL": "1 1 1 1 0.9 0.8 0.7 0.7 0.7 0.7 0.6 0.5 0.4 0.4 0.5 0.6 0.7 0.8 0.9 1 1 1 1 1",
        "LL128": "1 1 1 1 1 0.9 0.8 0.8 0.8 0.7 0.6 0.6 0.6 0.6 0.6 0.6 0.8 0.9 0.9 0.9 0.9 1 1 1",
        "Simple": "0.9 0.9 0.9 0.9 0.9 0.9 0.9 0.8 0.7 0.6 0.6 0.5 0.5 0.5 0.5 0.6 0.7 0.8 0.7 0.7 0.8 0.9 0.9 0.9",
    }.items()
}
_CORRECTED = 23
"""Number of sizes (powers of two, up to 256 MiB) for which NCCL has correction factors."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts of a group and its machine that NCCL's tuning reads."""

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
    """Number of channels that carry data: two for each that NCCL's search finds, unless settings limit them."""
    nvls: bool
    nvls_channels: int
    net_us: float
    """Latency that the network plugin reports: 0 except for EFA (aws-ofi-nccl)."""
    ll128: bool
    amd: bool
    collnet: bool
    simple_tree: bool = False
    """A NIC is near one GPU only: from Hopper on the search then takes a tree whose two children and parent all go
    through that one before it looks further (search.cc, "Try a simpler tree"), which NCCL reckons with 0.85 of the
    bandwidth (NCCL_TOPO_PATTERN_TREE)."""
    x86: bool = True
    version: tuple[int, int] = (2, 30)
    """Major and minor version of NCCL."""
    rccl: int = 0
    """Number of RCCL's tuning model; 0 for NCCL, and for an RCCL that uses NCCL's model."""
    nics: int = 1
    """Number of NICs that the ranks of a node use."""
    has_fewer_channels: bool = False
    """Whether the settings leave fewer channels than NCCL would open, so that these may limit LL128 and Simple."""
    has_fewer_nvls_channels: bool = False
    """Whether the settings leave NVLS fewer channels than NCCL would open for it, so that these may limit it."""
    slot_bytes: int = 1 << 19
    """Bytes of one of the eight slots of a channel's buffer in protocol Simple."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm with a protocol. *believed_us* is NCCL's estimate of its time; None if it is ruled out, for the
    reason in *why*.
    """

    algo: str
    proto: str
    believed_us: float | None
    why: str


def candidates(op: str, nbytes: float, machine: Machine) -> list[Candidate]:
    """Return every algorithm and protocol with NCCL's estimate for one collective."""
    result: list[Candidate] = []
    for algo in ALGORITHMS:
        for index, proto in enumerate(PROTOCOLS):
            why = _excluded(op, algo, proto, machine)
            if why:
                result.append(Candidate(algo, proto, None, why))
                continue
            bandwidth, latency = _bandwidth(op, algo, index, machine), _latency(op, algo, index, machine)
            if bandwidth <= 0:
                result.append(Candidate(algo, proto, None, "no link of this machine carries it"))
                continue
            if algo == "Tree" or (algo == "NVLSTree" and _corrects_nvls(machine)):
                bandwidth *= _correction(proto, nbytes)
            if algo == "Ring" and proto == "Simple" and machine.num_nodes > 1 and op == "all_reduce":
                if nbytes / (machine.channels * machine.num_ranks) >= 64:
                    latency *= tuning_of(machine.version).plateau[min(machine.generation, 2)]
            result.append(Candidate(algo, proto, latency + nbytes / (1000 * bandwidth), "allowed"))
    return result


def _correction(proto: str, nbytes: float) -> float:
    i = int(math.log2(max(nbytes, 1) / 64)) if nbytes >= 64 else 0
    return _TREE_CORRECTION[proto][i] if i < _CORRECTED else 1.0


def _corrects_nvls(machine: Machine) -> bool:
    """Return whether NVLSTree is corrected like trees: from 2.29 on, on Blackwell with x86 (ncclTopoGetAlgoTime)."""
    return machine.version >= (2, 29) and machine.generation >= 3 and machine.x86


_ALGORITHM_SINCE = {"NVLS": (2, 17), "NVLSTree": (2, 18), "PAT": (2, 23)}
"""The release that brought an algorithm (NCCL release notes)."""


def _excluded(op: str, algo: str, proto: str, machine: Machine) -> str:
    since = _ALGORITHM_SINCE.get(algo)
    if since is not None and machine.version < since:
        return f"{algo} came with NCCL {since[0]}.{since[1]}"
    if algo.startswith("CollNet"):
        return (
            "no CollNet plugin in this cluster" if not machine.collnet else "not modelled: NVLS or Tree is used instead"
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
        return "NVLS needs more than 2 ranks"
    if algo == "NVLS" and machine.num_nodes > 1 and not machine.collnet:
        return "NVLS between nodes needs CollNet"
    if algo == "NVLSTree" and machine.num_nodes == 1:
        return "one node needs no NVLSTree"
    if algo == "PAT":
        if op not in ("all_gather", "reduce_scatter"):
            return f"{op} has no PAT"
        if machine.num_ranks > machine.num_nodes:
            return "PAT needs one GPU per node"
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
    """Return the bandwidth over all heads (one per GPU); since 2.28 NVLS's known bandwidth, before that a ring's."""
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


def nvls_channel_gbps(machine: Machine) -> float:
    """Return the GB/s of busbw that NCCL assumes a channel of NVLS to carry at most (perChMaxNVLSTreeBws of tuning.cc,
    on one node as on two)."""
    caps = _V228.nvls_tree or ()
    return caps[machine.generation][max(1, _column(machine))]


def channel_gbps(machine: Machine, proto: str) -> float:
    """Return the GB/s that NCCL assumes a channel to carry at most in LL128 or Simple (perChMaxRingLL128Bws and
    perChMaxTreeBws of tuning.cc, one node)."""
    tuning = tuning_of(machine.version)
    by_generation = tuning.ring_ll128 if proto == "LL128" else tuning.tree_simple
    return by_generation[machine.generation][0]


def steps_of(op: str, size: int) -> int:
    """Return the number of steps of a ring of *size*."""
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
