"""Compares a whole cluster with machines of its kind, by the model and its interval.

One node is found by comparing nodes (health.py). That all of them are slow shows in comparison with others only. The
interval holds 8 of 10 healthy machines, so that being above it proves nothing: measured on 88 tables of healthy
machines that a fit had left out, 18 are above it in half of the rows of a class of sizes, 4 above twice its logarithm,
and none above three times that, where 86 of 87 that were made twice as slow are found.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from distsim.cluster.files.load import kind_of
from distsim.errors import UsageError

if TYPE_CHECKING:
    from distsim.calibration.compare import Bench
    from distsim.calibration.logs.folder import Logs
    from distsim.calibration.logs.parse import LogRun

BELOW, LOW, SLOWER = 3.0, 2.0, 1.0
"""Multiples of the interval's upper end, as logarithms of ratios of times."""
LEAST_BYTES = 1 << 16
LEAST_ROWS = 3
LARGE = "> 16 MiB"
"""Class of sizes in which presets are compared. A calibrated cluster file is compared in all."""
VERDICTS = {BELOW: "below", LOW: "low", SLOWER: "slower"}


@dataclass(frozen=True)
class ComparedCell:
    """Runs of one operation and class of sizes against the interval of the model."""

    op: str
    nodes: int
    gpus: int
    """GPUs of each node."""
    size: str
    rows: int
    multiple: float
    """What half of the rows are above: times the logarithm of the interval's upper end."""
    longer: float
    """Median share by which the times are longer than the interval's upper end; negative if they are shorter."""
    basis: str
    """What the interval is made of."""
    verdict: str
    """The worst of `VERDICTS` that holds; empty if the times are within the interval."""

    @property
    def is_below(self) -> bool:
        """Return whether no healthy machine was seen to be as slow."""
        return self.multiple > BELOW


def compare_with_model(logs: Logs, on: str) -> tuple[list[ComparedCell], list[str]]:
    """Compare the median of all runs of a kind with the model's time on a cluster, and return notes on what is assumed.

    Raises:
        UsageError: The logs are of another machine.
    """
    from distsim.calibration.logs.fit import benches_of
    from distsim.calibration.logs.folder import fits
    from distsim.collectives.constants import nccl_constants

    try:
        _, notes = fits(logs, on)
    except UsageError as error:
        raise UsageError(str(error).replace("--like", "--on")) from None
    cells: list[ComparedCell] = []
    for bench in benches_of(_medians(logs.runs), on, logs.version):
        bench.use(bench.own(nccl_constants()))
        cells += compare(bench)
    return sorted(cells, key=lambda cell: (-cell.multiple, cell.op, cell.nodes, cell.gpus, cell.size)), notes


def compare(bench: Bench) -> list[ComparedCell]:
    """Compare one table with the model's times, by class of sizes."""
    from distsim.collectives.uncertainty import OWN, interval, size_class

    table, cluster = bench.table, bench.compiler.cluster
    indices = [index for index, row in enumerate(table.rows) if row.size_bytes >= LEAST_BYTES]
    multiples: dict[str, list[tuple[float, float]]] = defaultdict(list)
    bases: dict[str, str] = {}
    for index, simulated_us in zip(indices, bench.times_us(indices) if indices else (), strict=True):
        row = table.rows[index]
        around = interval(cluster, row.size_bytes, table.nnodes, float(simulated_us), "nccl", table.op)
        size = size_class(row.size_bytes)
        if around is None or (size != LARGE and around.origin != OWN):
            continue
        upper = math.log(max(around.high_s / float(simulated_us), 1.0 + 1e-9))
        multiples[size].append((math.log(row.time_us / float(simulated_us)) / upper, row.time_us / around.high_s - 1))
        bases[size] = around.basis
    cells = []
    for size, several in multiples.items():
        if len(several) >= LEAST_ROWS:
            half = sorted((multiple for multiple, _ in several), reverse=True)[-(-len(several) // 2) - 1]
            longer = float(np.median([longer for _, longer in several]))
            verdict = next((text for least, text in VERDICTS.items() if half > least), "")
            where = table.op, table.nnodes, table.nproc_per_node, size, len(several)
            cells.append(ComparedCell(*where, half, longer, bases[size], verdict))
    return cells


def _medians(runs: Iterable[LogRun]) -> list[LogRun]:
    """Return one run of each configuration, with the median times of all."""
    alike: dict[tuple[object, ...], list[LogRun]] = defaultdict(list)
    for run in runs:
        alike[run.configuration].append(run)
    medians = []
    for several in alike.values():
        times: dict[int, list[float]] = defaultdict(list)
        for row in (row for run in several for row in run.rows):
            times[row.size_bytes].append(row.time_us)
        first = several[0]
        rows = {row.size_bytes: row for run in several for row in run.rows}
        medians.append(
            replace(
                first, rows=tuple(replace(rows[size], time_us=float(np.median(times[size]))) for size in sorted(rows))
            )
        )
    return medians


def expectation_text(cells: Sequence[ComparedCell], on: str) -> list[str]:
    """Return one line for each kind of runs that is above the interval, and one for the others."""
    kind = kind_of(on)
    own = any(cell.basis.startswith("this cluster") for cell in cells)
    whose = f"8 of 10 {'healthy runs' if own else 'machines like'} {'of ' * own}{kind}"
    heads = {"below": f"below what {kind} does: ", "low": "low, to be checked: ", "slower": ""}
    lines = [
        f"{heads[cell.verdict]}{cell.op} {cell.nodes} x {cell.gpus}, {cell.size}, takes {cell.longer:.0%} longer than "
        f"{whose}"
        for cell in cells
        if cell.verdict
    ]
    if not cells:
        return [f"nothing to compare with {kind}: presets are compared above 16 MiB, from {LEAST_ROWS} sizes on"]
    if len(lines) < len(cells):
        lines.append(f"as quick as {whose}: {len(cells) - len(lines)} of {len(cells)} kinds of runs")
    if not own:
        lines.append("a closer comparison: --on the file of distsim calibrate --from logs of a healthy day")
    return lines
