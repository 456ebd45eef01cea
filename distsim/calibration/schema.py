"""Types of the JSON reports of trace, health and validate."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from distsim.calibration.expectation import ComparedCell
from distsim.calibration.health import FailingNode, HealthCell, SlowNode, SlowPair
from distsim.calibration.predictions import Cell
from distsim.calibration.traces.answers import OpRow, RankTimes, Regression
from distsim.network.critical_path import PathPart


class TraceReport(TypedDict):
    """Who came last, and the critical path, in traces of all ranks."""

    schema: Literal["distsim.trace/1"]
    ops: list[OpRow]
    ranks: list[RankTimes]
    step: int | None
    """The step of the critical path; null: all of them."""
    path_s: float
    path: list[PathPart]
    """Parts of the critical path, the longest first."""
    notes: list[str]
    collectives: int
    """Calls that could be matched."""
    against: NotRequired[list[Regression]]
    """Kernels that take another time than in the traces of `--against`."""


class HealthReport(TypedDict):
    """Nodes that are slower, or fail more often, than the others."""

    schema: Literal["distsim.health/1"]
    nodes: list[str]
    slow_nodes: list[SlowNode]
    slow_pairs: list[SlowPair]
    failing: list[FailingNode]
    failed: dict[str, int]
    """Pairs (or larger sets) with a node of which a run failed."""
    failed_runs: int
    cells: list[HealthCell]
    runs: int
    deciding_pairs: list[list[str]]
    """Pairs of nodes whose runs would decide between candidates."""
    expected: NotRequired[list[ComparedCell]]
    """Comparison of all nodes with the cluster of `--on`."""


class RegimeErrors(TypedDict):
    """Errors in one range of sizes, as shares of the measured time."""

    median: float
    """Of absolute errors."""
    signed: NotRequired[float]
    """Median of signed errors."""
    p90: float
    rows: int


class ValidatedRow(TypedDict):
    """One size of a table of measurements."""

    size_bytes: int
    measured_us: float
    simulated_us: float


class ValidatedTable(TypedDict):
    """One table of measurements against the model."""

    name: str
    op: str
    on: str
    """Cluster."""
    use: Literal["left", "fit"]
    """`left`: constants that were fitted without the machine; `fit`: the shipped constants."""
    regimes: dict[str, RegimeErrors]
    rows: NotRequired[list[ValidatedRow]]


class ValidationReport(TypedDict):
    """Errors of predicted collectives against measurements."""

    schema: Literal["distsim.validation/1"]
    tables: list[ValidatedTable]
    regimes: dict[str, RegimeErrors]
    broken: list[str]
    """Tables that cannot be compared."""
    split: list[Cell]
