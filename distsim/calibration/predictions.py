"""Predictions of machines that no fit has seen, and their errors."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.compare import REGIMES, Bench, MeasuredTable, data_folder
from distsim.collectives import canonical_op
from distsim.collectives.constants import Constants, nccl_constants
from distsim.collectives.uncertainty import NODE_CLASSES, node_class

# -- Predictions of tables that were left out: what the model says of a machine that it has not seen.

FEW_NODES = "1 and 2 nodes"
"""The name under which left_out.toml has the constants that were fitted to so few nodes only."""


@dataclass(frozen=True)
class Prediction:
    """One table, simulated three times."""

    bench: Bench
    fitted_us: NDArray[np.float64]
    """Times in microseconds with the constants that distsim ships."""
    left_out_us: NDArray[np.float64] | None
    """Times with constants fitted without the machine's tables; None if the machine is not among the fitted ones."""
    few_nodes_us: NDArray[np.float64] | None
    """Times with constants fitted on one and two nodes, for tables of more nodes."""

    @property
    def fabric(self) -> str:
        """Return the fabric by NCCL's name; a single node has none."""
        cluster = self.bench.compiler.cluster
        if self.bench.table.nnodes == 1 or cluster.node.nvlink_domain_nodes >= self.bench.table.nnodes:
            return "none"
        return cluster.nccl.net

    @property
    def nodes(self) -> str:
        """Return the class of its number of nodes; an NVLink domain counts as one."""
        return "1 node" if self.fabric == "none" else node_class(self.bench.table.nnodes)


@cache
def _cases() -> Mapping[str, Mapping[str, float]]:
    path = data_folder() / "left_out.toml"
    if not path.is_file():
        return {}
    cases: dict[str, dict[str, float]] = tomllib.loads(path.read_text("utf-8"))
    return cases


def predicted(tables: Sequence[MeasuredTable], constants: Constants | None = None) -> list[Prediction]:
    """Predict each table without its machine, and tables of more than two nodes also without such tables."""
    constants = constants or nccl_constants()
    result: list[Prediction] = []
    for table in tables:
        bench = Bench.of(table)

        def times(case: str, bench: Bench = bench) -> NDArray[np.float64] | None:
            values = _cases().get(case)
            if values is None:
                return None
            bench.use(bench.own(constants.changed(values)))
            return bench.times_us()

        left_out = times(table.machine)
        domain = bench.compiler.cluster.node.nvlink_domain_nodes
        few = times(FEW_NODES) if table.nnodes > max(2, domain) else None
        bench.use(bench.own(constants))
        result.append(Prediction(bench, bench.times_us(), left_out, few))
    return result


# -- Errors of predictions by fabric, number of nodes and size, every machine with the same weight.

KINDS = ("machine left out", "more nodes left out", "fitted")
"""How a table is predicted: by constants that used none of its machine, none of more than two nodes, or all tables."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table."""

    kind: str
    fabric: str
    nodes: str
    machines: int
    tables: int
    median: tuple[float | None, ...]
    """Median absolute error of each size range; None where nothing was measured."""


def _times(one: Prediction, kind: str) -> NDArray[np.float64] | None:
    return {KINDS[0]: one.left_out_us, KINDS[1]: one.few_nodes_us, KINDS[2]: one.fitted_us}[kind]


def by_weight(machines: Mapping[str, Sequence[float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return all values in order, and their weights, which add up to 1, where each machine counts the same."""
    values = np.array([value for each in machines.values() for value in each])
    weights = np.array([1.0 / len(each) for each in machines.values() for _ in each]) / len(machines)
    order = np.argsort(values, kind="stable")
    return values[order], weights[order]


def weighted_quantile(machines: Mapping[str, Sequence[float]], share: float = 0.5) -> float:
    """Return the quantile of all values where each machine counts the same."""
    values, weights = by_weight(machines)
    return float(np.interp(share, np.cumsum(weights) - weights / 2, values))


def _errors(predictions: Iterable[Prediction], kind: str, index: int) -> dict[str, list[float]]:
    result: dict[str, list[float]] = {}
    for one in predictions:
        times = _times(one, kind)
        if times is not None:
            chosen = one.bench.regimes == index
            errors = np.abs(times / one.bench.measured_us - 1.0)[chosen].tolist()
            if errors:
                result.setdefault(one.bench.table.machine, []).extend(errors)
    return result


def _cell(kind: str, fabric: str, nodes: str, predictions: Sequence[Prediction]) -> Cell | None:
    some = [one for one in predictions if _times(one, kind) is not None]
    if not some:
        return None
    by_size = [_errors(some, kind, index) for index in range(len(REGIMES))]
    median = tuple(weighted_quantile(errors) if errors else None for errors in by_size)
    return Cell(kind, fabric, nodes, len({one.bench.table.machine for one in some}), len(some), median)


def split(predictions: Sequence[Prediction]) -> list[Cell]:
    """Return a line for all tables of each kind, then one for each fabric and class of nodes."""
    cells = [_cell(kind, "all", "all", predictions) for kind in KINDS]
    for fabric in sorted({one.fabric for one in predictions}):
        for nodes in NODE_CLASSES:
            some = [one for one in predictions if (one.fabric, one.nodes) == (fabric, nodes)]
            cells += [_cell(kind, fabric, nodes, some) for kind in KINDS]
    return [cell for cell in cells if cell is not None]


def worst_machines(predictions: Sequence[Prediction], kind: str, index: int) -> list[tuple[float, str]]:
    """Return the median error of each machine in one regime, the worst first."""
    errors = _errors(predictions, kind, index)
    return sorted(((float(np.median(each)), machine) for machine, each in errors.items()), reverse=True)


# -- Measured against simulated: errors by table and regime, and the bounds they are held to.

BOUNDS = {
    "machine left out": (0.12, 0.15, 0.06),
    "more nodes left out": (0.12, 0.16, 0.11),
    "fitted": (0.06, 0.10, 0.05),
}
"""Median absolute error by regime of size, every machine with the same weight, at most."""
_LEAST_MACHINES = 5
"""Smallest number of machines for which a median is compared with a bound."""
MACHINE_BOUND = {"machine left out": 0.40, "fitted": 0.25}
"""Largest allowed median absolute error of a machine in any regime."""


@dataclass(frozen=True)
class Errors:
    """One table: (simulated - measured) / measured for every row, with the regime of each."""

    bench: Bench
    simulated_us: NDArray[np.float64]
    use: str = "left"
    """`left`: constants that were fitted without the machine; `fit`: the shipped constants."""

    @property
    def relative(self) -> NDArray[np.float64]:
        """Return the signed relative errors."""
        result: NDArray[np.float64] = self.simulated_us / self.bench.measured_us - 1.0
        return result

    def of(self, index: int) -> NDArray[np.float64]:
        """Return the errors in one regime."""
        result: NDArray[np.float64] = self.relative[self.bench.regimes == index]
        return result


@dataclass(frozen=True)
class PredictionSummary:
    """Summary of the predictions of all tables."""

    tables: list[Errors]
    median: tuple[float, ...]
    p90: tuple[float, ...]
    rows: tuple[int, ...]
    broken: list[str]
    """Return a sentence for each bound that is exceeded."""


def summarise(predictions: Sequence[Prediction]) -> PredictionSummary:
    """Return the errors, each from a fit without the table's own machine, and the bounds that are exceeded.

    Tables of machines that no fit uses are compared with the constants as they are.
    """
    tables = [
        Errors(one.bench, one.fitted_us, "fit") if one.left_out_us is None else Errors(one.bench, one.left_out_us)
        for one in predictions
    ]
    median, p90, rows = [], [], []
    for index in range(len(REGIMES)):
        machines: dict[str, list[float]] = {}
        for errors in tables:
            machines.setdefault(errors.bench.table.machine, []).extend(np.abs(errors.of(index)).tolist())
        machines = {machine: each for machine, each in machines.items() if each}
        every = [value for each in machines.values() for value in each]
        rows.append(len(every))
        median.append(weighted_quantile(machines) if machines else 0.0)
        p90.append(float(np.percentile(every, 90)) if every else 0.0)
    return PredictionSummary(tables, tuple(median), tuple(p90), tuple(rows), list(_broken(predictions)))


def _broken(predictions: Sequence[Prediction]) -> Iterator[str]:
    for cell in split(predictions):
        if cell.fabric != "all" or cell.machines < _LEAST_MACHINES:
            continue
        for name, median, bound in zip(REGIMES, cell.median, BOUNDS[cell.kind], strict=True):
            if median is not None and median > bound:
                yield f"{cell.kind}, {name}: median error {median:.1%}, expected at most {bound:.0%}"
    for kind, bound in MACHINE_BOUND.items():
        for index, name in enumerate(REGIMES):
            worst = worst_machines(predictions, kind, index)
            for median, machine in worst if kind == "fitted" or len(worst) >= _LEAST_MACHINES else ():
                if median > bound:
                    yield f"{kind}, {machine}, {name}: median error {median:.1%}, expected at most {bound:.0%}"


_COLLECTIVES = {
    "all_reduce": "ALL_REDUCE",
    "all_gather": "ALL_GATHER",
    "reduce_scatter": "REDUCE_SCATTER",
    "alltoall": "ALL_TO_ALL",
}


def torch_times_us(bench: Bench) -> NDArray[np.float64] | None:
    """Return the times that torch's estimator predicts for every row; None for an operation that it does not know."""
    import importlib

    analysis = importlib.import_module("torch._inductor.comm_analysis")
    cuda = importlib.import_module("torch").cuda
    name = _COLLECTIVES.get(bench.table.op)
    if name is None or not hasattr(analysis.NCCL_COLL, name):
        return None
    cluster = bench.compiler.cluster
    capability = cluster.nccl.compute_capability
    kinds = analysis.NVIDIA_GPU_TYPE
    kind = kinds.BLACKWELL if capability >= 100 else kinds.HOPPER if capability >= 90 else kinds.AMPERE
    with (
        mock.patch.object(analysis, "get_gpu_type", return_value=kind),
        mock.patch.object(analysis, "_has_nvlink", return_value=cluster.node.nvlink != "none"),
        mock.patch.object(cuda, "is_available", return_value=True),
        mock.patch.object(cuda, "device_count", return_value=bench.table.nproc_per_node),
    ):
        estimate = analysis.estimate_nccl_collective_runtime_impl
        collective = getattr(analysis.NCCL_COLL, name)
        return np.array([1e3 * estimate(row.size_bytes, len(bench.devices), collective) for row in bench.table.rows])


def nccl_times_us(bench: Bench) -> NDArray[np.float64] | None:
    """Return NCCL's own estimate for every row, by which it chooses (src/graph/tuning.cc); None if it has no choice
    to make.
    """
    op, nccl = canonical_op(bench.table.op), bench.compiler.nccl
    group = bench.compiler.group(bench.devices, 0)
    times = [nccl.believed_us(group, op, row.size_bytes) for row in bench.table.rows]
    return None if None in times else np.array(times)
