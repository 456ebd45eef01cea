"""Intervals of simulated times, which contain the measured time of a collective or step in eight of ten cases."""

from __future__ import annotations

import csv
import math
import tomllib
from dataclasses import dataclass
from functools import cache
from typing import Any

from distsim.cluster import Cluster
from distsim.collectives.constants import fitted_folder
from distsim.collectives.plan import canonical_op
from distsim.errors import UsageError

# -- How sure a simulated time is: where a measured one lies in eight cases of ten.
#
# A regime is a fabric (or none, inside a node), a class of nodes and a class of sizes. For a cluster whose file was
# calibrated it is the spread of its own logs; for a preset that is one fitted machine that of its fabric's tables; for
# any other that of machines that a fit had left out, in that fabric, held to what others show by how few machines have
# it. The spreads are `errors.csv` beside the fitted constants, made when these are.

SIZES = ("< 64 KiB", "64 KiB - 16 MiB", "> 16 MiB")
_LEAST = (0, 1 << 16, (1 << 24) + 1)
_NODES = ((1, "1 node"), (2, "2 nodes"), (31, "3 to 31"), (1 << 30, "32 and more"))
NODE_CLASSES = tuple(name for _, name in _NODES)
OWN, FITTED, LEFT_OUT = "own logs", "fitted", "left out"
OTHERS = "others"
"""Stands for a fabric that was measured on no machine: the errors of all fabrics but InfiniBand."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The narrowest interval that holds eight of ten measured times."""

    low_s: float
    high_s: float
    origin: str
    """own logs: the cluster's file was calibrated; fitted: tables of this machine are among the fitted; left out: the
    errors of machines that a fit had not seen."""
    fabric: str
    """Fabric whose errors these are: its name in NCCL, none inside a node, `OTHERS` if it was never measured."""
    nodes: str
    size: str

    @property
    def borrowed(self) -> bool:
        """Return whether the errors are those of other fabrics."""
        return self.fabric == OTHERS

    @property
    def basis(self) -> str:
        """Return the basis of the interval as text."""
        where = {"none": "inside a node", OTHERS: "all fabrics but InfiniBand"}.get(self.fabric, self.fabric)
        source = {OWN: "this cluster's logs", FITTED: "this machine's tables", LEFT_OUT: "machines left out of the fit"}
        return f"{source[self.origin]}, {where}, {self.nodes}"


@dataclass(frozen=True, slots=True)
class _Spread:
    low: float
    high: float
    presets: tuple[str, ...]


def size_class(nbytes: float) -> str:
    """Return the class of `SIZES` to which a size belongs."""
    return SIZES[sum(nbytes >= least for least in _LEAST) - 1]


def node_class(num_nodes: int) -> str:
    """Return the class of node counts by which errors are grouped."""
    return next(name for most, name in _NODES if num_nodes <= most)


@cache
def _spreads() -> dict[tuple[str, ...], _Spread]:
    path = fitted_folder() / "errors.csv"
    if not path.is_file():
        return {}
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    return {
        (row["origin"], row["fabric"], row["nodes"], row["size"]): _Spread(
            float(row["low"]), float(row["high"]), tuple(row["presets"].split())
        )
        for row in csv.DictReader(lines)
    }


MOST_NODES = 256
"""Nodes of the largest measured table (calibration/tables/_index.csv)."""
MOST_GPUS = 512
"""GPUs of the largest published step (tools/fitting/rows.csv)."""
MOST_RACKS = 2
"""NVLink domains of several nodes in one measured table (calibration/tables/_index.csv: oci_gb200_n32x4,
oci_gb300_n32x4)."""


def beyond_measured_racks(cluster: Cluster, num_nodes: int) -> bool:
    """Return whether a call spans more racks (NVLink domains) than any measured table.

    There, the choice between a ring and the switches' tree, and the tree's share of the NICs, are NCCL's own model
    without a measurement.
    """
    span = cluster.node.nvlink_domain_nodes
    return span > 1 and -(-num_nodes // span) > MOST_RACKS


def interval(
    cluster: Cluster, nbytes: float, num_nodes: int, time_s: float, flavour: str = "nccl", op: str = "all_reduce"
) -> Interval | None:
    """Return the interval around *time_s*, simulated for *nbytes* of *op* (as in `Transfer`) over *num_nodes* nodes.
    A calibrated cluster has its own for the operations that its logs have. None if nothing of the kind was
    measured: gloo, MPI and plain alpha-beta.
    """
    if flavour != "nccl" or cluster.nccl.version == "ideal" or not cluster.node.num_gpus:
        return None
    domains = -(-num_nodes // max(1, cluster.node.nvlink_domain_nodes))
    fabric, nodes = ("none", NODE_CLASSES[0]) if domains <= 1 else (cluster.nccl.net, node_class(num_nodes))
    size = size_class(nbytes)
    own = cluster.errors.get(f"{nodes}, {size}")
    if own is not None and (not own[2] or _family(op) in map(_family, own[2])):
        return Interval(time_s * own[0], time_s * own[1], OWN, fabric, nodes, size)
    if beyond_measured_racks(cluster, num_nodes):
        return None
    return around(cluster.name, fabric, nodes, size, time_s, num_nodes)


def _family(op: str) -> str:
    """Return one name for all spellings; a record may be of what no logs have (blocks of messages)."""
    try:
        return "sendrecv" if op in ("send", "recv") else canonical_op(op)
    except UsageError:
        return op


def around(name: str, fabric: str, nodes: str, size: str, time_s: float, num_nodes: int = 1) -> Interval | None:
    """Return the interval of a cluster by name in one regime; an empty name means a cluster without a fit."""
    preset, spreads = name.partition(":")[0], _spreads()
    wider = widening(num_nodes, MOST_NODES)
    shown = nodes if wider == 1.0 else f"more than {MOST_NODES} nodes"
    for origin, whose in ((FITTED, fabric), (LEFT_OUT, fabric), (LEFT_OUT, OTHERS)):
        spread = spreads.get((origin, whose, nodes, size))
        if spread is None or (origin == FITTED and preset not in spread.presets):
            continue
        return Interval(time_s * spread.low**wider, time_s * spread.high**wider, origin, whose, shown, size)
    return None


def widening(number: int, most: int) -> float:
    """Return the exponent that widens an interval beyond the largest measured size.

    An error of the model may grow with the size, and no measurement says how much: each doubling adds the interval's
    width once more.

    Args:
        number: Nodes or GPUs of the simulated time.
        most: Nodes or GPUs of the largest measurement.
    """
    return 1.0 + max(0.0, math.log2(number / most))


# -- How far a measured training step lies from a simulated one: what published steps say, by regime.
#
# A regime is what the errors go by: how much of the step the host needs to launch its kernels, and else one node,
# many, or so many that their network may bound the step. The spreads are `step_errors.toml` beside the fitted
# constants, made by `python -m tools.fitting.step_errors`.

ONE_NODE, MANY_NODES, LAUNCH_BOUND = "one node", "many nodes", "near launch-bound"
MANY_GPUS = "64 GPUs and more"
_MANY_GPUS = 64
HOST_SHARE = 0.5
"""Share of a step that the host needs for all its launches, from which on module calls, hooks and logging, which have
no price, may determine the time of the step. They double the host's time at most: a published layer keeps the host of
nanotron's benchmarks and of Megatron-DeepSpeed's busy for 3.6 to 4.4 ms, the priced classes for 2.4 to 4.1 ms.
"""


@dataclass(frozen=True, slots=True)
class StepError:
    """Interval of measured steps in one regime, as factors of the simulated step."""

    regime: str
    low: float
    high: float
    rows: int
    frameworks: int
    unmeasured: tuple[str, ...] = ()
    """What no published step has and the interval is widened for: the number of GPUs, the card."""


def regime_of(host_work_s: float, step_s: float, nodes: int) -> str:
    """Return the regime of a step on *nodes* nodes; *host_work_s* is the host's time for launching its work."""
    if host_work_s >= HOST_SHARE * step_s:
        return LAUNCH_BOUND
    return ONE_NODE if nodes == 1 else MANY_NODES


def sized_regime(regime: str, gpus: int) -> str:
    """Return the regime of a step of *regime* on *gpus* GPUs: many nodes may be `MANY_GPUS`."""
    return MANY_GPUS if regime == MANY_NODES and gpus >= _MANY_GPUS else regime


@dataclass(frozen=True, slots=True)
class PeakError:
    """Relative errors of predicted memory peaks, compared with published ones."""

    median: float
    worst: float
    rows: int


@cache
def _training_errors() -> dict[str, dict[str, Any]]:
    return tomllib.loads((fitted_folder() / "step_errors.toml").read_text(encoding="utf-8"))


def memory_error() -> PeakError:
    """Return the errors of predicted memory peaks."""
    return PeakError(**_training_errors()["memory"])


def ratio_error() -> float:
    """Return the factor by which the ratio of two steps of one program on one kind of node is off, at most, in eight
    of ten published pairs: what they have in common cancels.
    """
    return float(_training_errors()["ratio"]["factor"])


def _sources(card: str) -> int:
    return int(_training_errors()["cards"].get(card, 0))


def step_widening(regime: str, gpus: int, card: str) -> float:
    """Return the exponent that widens the interval of *regime* for a step on *gpus* GPUs of the model *card*."""
    own = bool(card) and _sources(card) < 2 and sized_regime(regime, gpus) != MANY_GPUS
    return widening(gpus, MOST_GPUS) + own


def step_error(regime: str, gpus: int, card: str = "") -> StepError:
    """Return the errors of *regime* for a step on *gpus* GPUs of the model *card*.

    Each doubling beyond the largest published step widens the interval by its width, and so does a card of which steps
    are published by fewer than two sources: its own errors are not among those of the regime, or are those of one
    machine. The errors of 64 GPUs and more are those of rows that nobody had seen, so the card is in them.
    """
    regime, sources = sized_regime(regime, gpus), _training_errors()["cards"].get(card, 0)
    known, wider, unmeasured = _training_errors()[regime], widening(gpus, MOST_GPUS), []
    if gpus > MOST_GPUS:
        unmeasured.append(f"no measurement at this size: the largest published step has {MOST_GPUS} GPUs")
    if card and sources < 2:
        wider += regime != MANY_GPUS
        unmeasured.append(f"published steps on {card} are of one source" if sources else f"no published step on {card}")
    ends = {"low": known["low"] ** wider, "high": known["high"] ** wider}
    return StepError(regime, **(known | ends), unmeasured=tuple(unmeasured))
