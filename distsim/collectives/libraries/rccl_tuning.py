"""RCCL's own cost model on MI250X, MI300 and MI355: which algorithm and protocol it takes. NCCL's is in `nccl_tuning`.

Source: ROCm/rccl, src/graph/tuning.cc: tuning_model_3 (8 gfx90a and 4 NICs, Frontier's node: rome_model_63 and 74 of
src/graph/rome_models.cc, at 0cbce2a), 5 and 6 (8 gfx942 or gfx950) and, from
2.25 on, src/misc/rccl_wrap.cc (rcclUpdateCollectiveProtocol): both as of 2.26; before as of 0cbce2a (2.21.5). MSCCL:
tools/msccl-algorithms (allreduce-allpairs-8n-*.xml) at 0cbce2a. Times in us, bandwidths in GB/s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from distsim.collectives.libraries.nccl_tuning import Candidate, Machine, Three, steps_of

LINK_GBPS = {3: 36.0, 5: 48.0, 6: 48.0}
"""GB/s that RCCL assumes for a link between two GPUs, by tuning model.

Source: MI200_XGMI_WIDTH and GFX94X_XGMI_WIDTH in src/graph/topo.h.
"""

_BASE_US = (12.0, 12.0, 17.0)
_PROTOCOLS = ("LL", "LL128", "Simple")
Range = tuple[int, int]
"""A protocol is used above the first size and up to the second, in bytes per rank."""


def _row(text: str) -> tuple[float, ...]:
    return tuple(float(one) for one in text.split())


@dataclass(frozen=True, slots=True)
class _Model:
    """One tuning model: by algorithm (Tree, Ring), three protocols each."""

    inside_us: dict[str, Three]
    between_us: dict[str, Three]
    two_nodes: dict[str, Three]
    """Share of a GPU's links that an algorithm has."""
    more_nodes: dict[str, Three]
    corrections: dict[str, tuple[tuple[float, ...], ...]]
    """Multiples of the bandwidth: 64 B, 128 B, ... 4 GiB; a ring's count between nodes only."""
    ranges: dict[str, tuple[Range, Range]]
    """Ranges of sizes for LL and for LL128, by operation; where both apply, LL128 is taken."""
    ll128: bool


_TREE_LL = (*(0.1,) * 6, *_row("1 1 1 1 1 0.6 1 0.9 1 1"), *(0.1,) * 11)
_RING_LL = (*(0.1,) * 11, *_row("1 0.2 1 0.4 0.4 0.1 0.2 0.2"), *(0.1,) * 8)
_MI300 = _Model(
    inside_us={"Tree": (0.9, 0.9, 2.3), "Ring": (0.8, 0.8, 2.1)},
    between_us={"Tree": (10.5, 10.5, 25.0), "Ring": (9.5, 9.5, 320.0)},
    two_nodes={"Tree": (0.06, 0.06, 0.11), "Ring": (0.08, 0.08, 1.0)},
    more_nodes={"Tree": (0.06, 0.06, 0.59), "Ring": (0.08, 0.08, 1.0)},
    corrections={
        "Tree": (_TREE_LL, _TREE_LL, (*(0.1,) * 15, 0.7, *(1.0,) * 5, 0.7, 0.7, 0.5, 0.6, 0.6, 0.6)),
        "Ring": (_RING_LL, _RING_LL, (*(0.1,) * 22, 1.0, 0.8, 1.0, 1.0, 1.0)),
    },
    ranges={
        "reduce_scatter": ((0, 655360), (131072, 3211264)),
        "all_gather": ((0, 98304), (98304, 5046272)),
        "all_reduce": ((0, 1048576), (1048576, 9437184)),
    },
    ll128=True,
)
_TREE_2_21 = (*(0.1,) * 15, 0.7, *(1.0,) * 10, 0.8)
_MI300_2_21 = replace(
    _MI300,
    corrections={
        "Tree": (_TREE_LL, _TREE_LL, _TREE_2_21),
        "Ring": (_RING_LL, _RING_LL, (*(0.1,) * 23, 0.8, 1.0, 1.0, 1.0)),
    },
    ranges={},
    ll128=False,
)
_MI300_2_22 = replace(
    _MI300_2_21,
    corrections={"Tree": _MI300_2_21.corrections["Tree"], "Ring": _MI300.corrections["Ring"]},
)
"""Its table was not seen: that a ring begins at 256 MiB, as in 2.26, is read off the times of 2 nodes of MI300X."""
_MI355 = replace(
    _MI300,
    corrections={
        "Tree": (
            _TREE_LL,
            (*_TREE_LL[:16], 1.0, 1.0, 1.0, 2.0, *(0.1,) * 7),
            (*(0.1,) * 15, 0.7, 1.0, 0.1, 0.1, 0.1, 0.9, 0.9, 0.7, 0.8, 0.6, 0.6, 0.6),
        ),
        "Ring": (
            _RING_LL,
            (*_RING_LL[:18], *(0.1,) * 9),
            (*(0.1,) * 22, 1.0, 0.8, 0.8, 1.0, 1.0),
        ),
    },
    ranges={
        "reduce_scatter": ((0, 131071), (131071, 4194304)),
        "all_gather": ((0, 7), (7, 8388608)),
        "all_reduce": ((0, 131071), (131071, 17660227)),
        "reduce": ((0, 16383), (16383, 16777216)),
        "broadcast": ((0, 2048), (2048, 16777216)),
    },
)
_NO_LL128 = (0.0,) * 27
_MI250 = _Model(
    inside_us={"Tree": (0.8, 0.0, 2.5), "Ring": (0.8, 0.0, 3.6)},
    between_us={"Tree": (12.5, 0.0, 22.4), "Ring": (9.5, 0.0, 19.8)},
    two_nodes={"Tree": (0.2, 0.0, 1.75), "Ring": (0.2, 0.0, 1.0)},
    more_nodes={"Tree": (0.2, 0.0, 0.96), "Ring": (0.2, 0.0, 1.0)},
    corrections={
        "Tree": (
            (*(0.1,) * 6, *_row("1 1 0.2 1 0.9 1 0.6 0.4 0.6 0.4"), *(0.3,) * 5, *(0.2,) * 6),
            _NO_LL128,
            (*(1.0,) * 6, *_row("0.1 0.1 0.1 0.2 1 0.8"), *(1.0,) * 9, *_row("0.8 0.7 0.8 0.9 0.7 0.7")),
        ),
        "Ring": (
            (*(0.1,) * 5, *_row("0.3 0.1 0.2 0.1 0.4 0.4 0.2 0.2 0.3 0.7 0.5 0.4"), *(0.3,) * 4, *(0.2,) * 6),
            _NO_LL128,
            (*(0.1,) * 7, *_row("0.5 1 0.1 0.3 0.1 0.1 0.1 0.2 0.2 0.2 0.3 0.4 0.7"), *(1.0,) * 7),
        ),
    },
    ranges={},
    ll128=False,
)
_MODELS = {3: _MI250, 5: _MI300, 6: _MI355}
_RING_LL_MORE = (("broadcast", "Ring", "LL"), ("reduce", "Ring", "LL"))
_MORE_NODES = 3.8
"""Factor on the largest size for which an all_reduce uses LL128, on more than two nodes."""


def model_of(compute_capability: int) -> int:
    """Return the number of RCCL's tuning model for nodes with 8 GPUs of this kind; 0 if there is none here, so that
    NCCL's model applies.
    """
    return {90: 3, 94: 5, 95: 6}.get(compute_capability, 0)


def _model(machine: Machine) -> _Model:
    if machine.rccl == 5 and machine.version < (2, 25):
        return _MI300_2_21 if machine.version < (2, 22) else _MI300_2_22
    return _MODELS[machine.rccl]


def rccl_candidates(op: str, nbytes: float, machine: Machine) -> list[Candidate]:
    """Return every algorithm and protocol with RCCL's estimate for one collective."""
    model, result = _model(machine), list(_all_pairs(op, nbytes, machine))
    for algo in ("Tree", "Ring"):
        for index, proto in enumerate(_PROTOCOLS):
            if why := _excluded(op, algo, proto, machine, model):
                result.append(Candidate(algo, proto, None, why))
                continue
            bandwidth = (
                machine.intra_gbps * (model.two_nodes if machine.num_nodes <= 2 else model.more_nodes)[algo][index]
            )
            bandwidth *= machine.num_ranks / steps_of(op, machine.num_ranks) if algo == "Ring" else 0.5
            if (op, algo, proto) in _RING_LL_MORE and machine.num_nodes == 1 and machine.rccl != 3:
                bandwidth *= 1.65
            if algo == "Tree" or machine.num_nodes > 1:
                row = model.corrections[algo][index]
                bandwidth *= row[min(max(int(nbytes) >> 6, 1).bit_length() - 1, len(row) - 1)]
            latency = _latency(op, algo, index, machine, model)
            result.append(Candidate(algo, proto, latency + nbytes / (1000 * bandwidth), "allowed"))
    for algo in ("NVLS", "PAT"):
        result.append(Candidate(algo, "Simple", None, f"RCCL has no {algo} here"))
    return result


def _all_pairs(op: str, nbytes: float, machine: Machine) -> Iterator[Candidate]:
    """Yield MSCCL's all_reduce of 8 GPUs on one node, which RCCL takes without asking its model."""
    if machine.rccl != 5 or machine.num_nodes > 1 or machine.num_ranks != 8:
        return
    for proto, first, last in (("LL", 1 << 10, (1 << 19) - 1), ("Simple", 1 << 19, 1 << 24)):
        if op == "all_reduce" and first <= nbytes <= last:
            yield Candidate("MSCCL", proto, 0.0, f"MSCCL has {first} to {last} bytes of 8 GPUs on one node")
        else:
            yield Candidate("MSCCL", proto, None, f"MSCCL has all_reduces from {first} to {last} bytes in {proto}")


def _excluded(op: str, algo: str, proto: str, machine: Machine, model: _Model) -> str:
    if algo == "Tree" and op != "all_reduce":
        return f"{op} has no tree"
    if algo == "Tree" and proto == "Simple" and machine.num_nodes == 1 and machine.rccl != 3:
        return "RCCL has no Tree in Simple on one node"
    if proto == "LL128" and machine.rccl == 3:
        return "RCCL's model of MI250X has no LL128"
    if proto == "LL128" and (machine.num_nodes == 1 or not model.ll128):
        return "RCCL's topology for one node has no LL128" if model.ll128 else "LL128 came with RCCL 2.25"
    return ""


def _latency(op: str, algo: str, index: int, machine: Machine, model: _Model) -> float:
    inside, between, nodes = model.inside_us[algo][index], model.between_us[algo][index], machine.num_nodes
    if algo == "Tree":
        depth = nodes.bit_length() - 1
        return _BASE_US[index] + 2 * ((machine.num_ranks // nodes - 1) * inside + depth * between)
    if machine.num_ranks == nodes:
        between = model.between_us["Tree"][index]
    if op in ("broadcast", "reduce"):
        # Rings of MI300 differ channel by channel: every step counts, in Simple as a tree's.
        step = model.inside_us if nodes == 1 else model.between_us
        return _BASE_US[index] + steps_of(op, machine.num_ranks) * step["Tree" if index == 2 else "Ring"][index]
    overhead = (2.0 if machine.amd else 1.0) * (3.0 if index == 2 else 1.0) if nodes > 1 else 0.0
    far = 0 if nodes == 1 else (nodes - 1) * (2 if op == "all_reduce" else 1)
    return _BASE_US[index] + (steps_of(op, machine.num_ranks) - far) * max(inside, overhead) + far * between


def ranged_protocol(op: str, nbytes: float, machine: Machine) -> str | None:
    """Return the protocol that RCCL takes between nodes for this size per rank; None if the model has no ranges."""
    model = _model(machine)
    if machine.num_nodes < 2 or op not in model.ranges:
        return None
    each = nbytes if op == "all_reduce" else nbytes / machine.num_ranks
    low, high = model.ranges[op]
    end = high[1] * (_MORE_NODES if op == "all_reduce" and machine.num_nodes > 2 else 1.0)
    if high[0] < each <= end:
        return "LL128"
    return "LL" if low[0] < each <= low[1] else "Simple"
