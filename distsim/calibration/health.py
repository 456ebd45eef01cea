"""`distsim health`: the node that is slower than the others in logs of nccl-tests.

Runs of two nodes are compared with equal runs of other pairs, runs of one node with those of other nodes, not with a
model (expectation.py compares all of them with one). The reference is the lower quartile of the times, not the median:
of four nodes a sick one is in half of the pairs. A node is named only if the number of its slow pairs is improbable at
the rate of the pairs without it, because in healthy clusters single pairs are slow, too: paths that share a link, tests
that ran at once.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distsim.text.units import plural

if TYPE_CHECKING:
    from distsim.calibration.logs.folder import Logs

SCHEMA = "distsim.health/1"
SLOW = 0.05
"""Smallest share by which a pair or a node has to be slower."""
SPREADS = 5.0
"""Spreads of the times by which it has to be slower."""
LEAST_SPREAD = 0.004
MOST_SPREAD = 0.06
"""Spread of the times above which there is no usual time."""
MOST_SLOW = 0.4
"""Share of slow pairs above which there is no usual time, from `MANY` nodes on."""
MANY = 8
"""Number of nodes from which a node is certain that is slow in all kinds of runs, of two operations and more."""
ENOUGH = 12
"""Number of nodes from which a node is certain that is slow in one kind: among fewer, one that is alone behind a switch
looks the same (in 4 of 248 sets of 8 healthy nodes of two public clusters, and in none of 12 and more).
"""
CHANCE = 0.001
"""Largest probability, over all nodes, that a healthy node is named."""
LEAST_RATE = 0.05
"""Rate at which pairs of healthy nodes are slow, unless the logs show a larger one. Of healthy nodes of two public
clusters one pair in eight to sixteen is (github.com/xxrjun/nccl-tests-cluster).
"""
LEAST_FAILURES = 0.02
"""The same of runs that fail."""
FEWEST = 5
"""Number of nodes from which one of them may stand out: of four, a sick one is in half of the pairs."""
LEAST_BYTES = 1 << 16
"""Smaller sizes show latencies, which differ by noise."""


@dataclass(frozen=True)
class SlowNode:
    """A node that is slower than the others in one kind of run."""

    node: str
    op: str
    gpus: int
    """GPUs of the node in the run."""
    size: str
    slow_pairs: int
    """Number of its pairs that are slow; 0 for runs of one node."""
    pairs: int
    slower: float
    """Median share by which its slow pairs, or it itself, take longer."""
    is_certain: bool = True
    """Whether it ran alone, or is one of `ENOUGH` nodes, or one of `MANY` and slow in all kinds of runs."""


@dataclass(frozen=True)
class SlowPair:
    """Two nodes that are slower together, of which neither is at fault by what is known."""

    nodes: tuple[str, str]
    op: str
    gpus: int
    size: str
    slower: float


@dataclass(frozen=True)
class FailingNode:
    """A node whose runs fail with more partners than those of the others."""

    node: str
    failed: int
    """Number of pairs (or larger sets of nodes) with it of which a run failed."""
    tried: int


@dataclass
class HealthCell:
    """Equal runs: of one operation, number of GPUs and class of sizes."""

    op: str
    gpus: int
    size: str
    runs: int
    spread: float = 0.0
    unknown: str = ""
    """Reason why nothing is compared; empty if the runs are compared."""


@dataclass
class Health:
    """What the logs of a cluster show of its nodes."""

    nodes: list[str] = field(default_factory=list)
    slow_nodes: list[SlowNode] = field(default_factory=list)
    slow_pairs: list[SlowPair] = field(default_factory=list)
    failing: list[FailingNode] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    """Number of pairs (or larger sets) with a node of which a run failed."""
    failed_runs: int = 0
    cells: list[HealthCell] = field(default_factory=list)

    @property
    def is_sick(self) -> bool:
        """Return whether a node is named."""
        return any(node.is_certain for node in self.slow_nodes) or bool(self.failing)


def examine(logs: Logs) -> Health:
    """Compare the nodes of *logs* with each other."""
    from distsim.collectives.uncertainty import size_class

    groups = [*(run.hosts for run in logs.runs), *(run.hosts for run in logs.failed)]
    health = Health(sorted({host for hosts in groups for host in hosts}), failed_runs=len(logs.failed))
    cells: dict[tuple[str, int, str, int], list[tuple[tuple[str, ...], dict[int, float]]]] = defaultdict(list)
    for run in logs.runs:
        by_size: dict[str, dict[int, float]] = defaultdict(dict)
        for row in run.rows:
            if row.size_bytes >= LEAST_BYTES:
                by_size[size_class(row.size_bytes)][row.size_bytes] = row.time_us
        for size, times in by_size.items():
            cells[run.op, run.nproc_per_node, size, len(run.hosts)].append((tuple(sorted(run.hosts)), times))
    of_pairs: list[HealthCell] = []
    for (op, gpus, size, num_hosts), runs in sorted(cells.items()):
        if num_hosts > 2:
            health.cells.append(
                HealthCell(op, gpus, size, len(runs), 0.0, f"of runs of {num_hosts} nodes, none is at fault alone")
            )
            continue
        values = _relative(runs)
        cell = HealthCell(op, gpus, size, len(runs), _spread(list(values.values())))
        health.cells.append(cell)
        nodes = sorted({node for group in values for node in group})
        if len(nodes) < FEWEST:
            cell.unknown = f"{plural(len(nodes), 'node')}: expected {FEWEST} and more to compare"
        elif cell.spread > MOST_SPREAD:
            cell.unknown = f"times differ by {cell.spread:.0%}: no usual time"
        elif num_hosts == 1:
            _compare_nodes(health, cell, values)
        else:
            _compare_pairs(health, cell, values, nodes)
            if not cell.unknown and len(nodes) >= MANY:
                of_pairs.append(cell)
    health.slow_nodes = [one if one.is_certain else _confirmed(one, health, of_pairs) for one in health.slow_nodes]
    _compare_failures(health, logs)
    return health


def _relative(runs: Sequence[tuple[tuple[str, ...], dict[int, float]]]) -> dict[tuple[str, ...], float]:
    """Return for each pair (or node) the logarithm of its time over the lower quartile of all, the median of its sizes
    and runs."""
    all_times: dict[int, list[float]] = defaultdict(list)
    for _, times in runs:
        for size, time_us in times.items():
            all_times[size].append(math.log(time_us))
    usual = {size: _quantile(times, 0.25) for size, times in all_times.items()}
    values: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for nodes, times in runs:
        values[nodes].append(_quantile([math.log(time_us) - usual[size] for size, time_us in times.items()], 0.5))
    return {nodes: _quantile(several, 0.5) for nodes, several in values.items()}


def _spread(values: Sequence[float]) -> float:
    """Return the spread of the lower half of the values around their median.

    Slow pairs raise it only by raising the median, so that two kinds of pairs show as a large spread.
    """
    middle = _quantile(values, 0.5)
    return max(LEAST_SPREAD, 1.4826 * _quantile([middle - value for value in values if value <= middle], 0.5))


def _limit(cell: HealthCell) -> float:
    """Return the logarithm of the ratio of times from which one is slow."""
    return max(math.log1p(SLOW), SPREADS * cell.spread)


def _quantile(values: Iterable[float], share: float) -> float:
    return float(np.quantile(list(values), share))


def _compare_nodes(health: Health, cell: HealthCell, values: Mapping[tuple[str, ...], float]) -> None:
    middle = _quantile(values.values(), 0.5)
    limit = _limit(cell)
    for (node,), value in sorted(values.items(), key=lambda one: -one[1]):
        if value - middle > limit:
            slower = math.expm1(value - middle)
            health.slow_nodes.append(SlowNode(node, cell.op, cell.gpus, cell.size, 0, 0, slower))


def _compare_pairs(
    health: Health, cell: HealthCell, values: Mapping[tuple[str, ...], float], nodes: Sequence[str]
) -> None:
    limit = _limit(cell)
    slow = {pair for pair, value in values.items() if value > limit}
    if len(nodes) >= MANY and len(slow) > MOST_SLOW * len(values):
        cell.unknown = f"{len(slow)} of {len(values)} pairs are slow: no usual time"
        return
    left = dict(values)
    while True:
        counts = {
            node: (sum(node in pair for pair in slow & left.keys()), sum(node in pair for pair in left))
            for node in nodes
        }
        chances = {}
        for node, (number, of) in counts.items():
            others = [pair for pair in left if node not in pair]
            rate = max(LEAST_RATE, sum(pair in slow for pair in others) / max(1, len(others)))
            chances[node] = _tail(number, of, rate) * len(nodes)
        worst = min(nodes, key=lambda node: (chances[node], node))
        if chances[worst] >= CHANCE:
            break
        own = [pair for pair in left if worst in pair]
        slower = math.expm1(_quantile([values[pair] for pair in own if pair in slow], 0.5))
        health.slow_nodes.append(
            SlowNode(worst, cell.op, cell.gpus, cell.size, *counts[worst], slower, len(nodes) >= ENOUGH)
        )
        for pair in own:
            del left[pair]
    for pair in sorted(slow & left.keys(), key=lambda pair: (-values[pair], pair)):
        health.slow_pairs.append(SlowPair((pair[0], pair[1]), cell.op, cell.gpus, cell.size, math.expm1(values[pair])))


def _confirmed(node: SlowNode, health: Health, cells: Sequence[HealthCell]) -> SlowNode:
    """Return *node* as certain if it is named in all of *cells* in which it could show, those of two operations.

    Cells compared `MANY` nodes. It could show where it is slow enough for the spread of the times.
    """
    could = {(one.op, one.gpus, one.size) for one in cells if math.log1p(node.slower) > _limit(one)}
    named = {(one.op, one.gpus, one.size) for one in health.slow_nodes if one.node == node.node and one.pairs}
    return replace(node, is_certain=len({op for op, _, _ in could}) > 1 and named >= could)


def _compare_failures(health: Health, logs: Logs) -> None:
    """Name nodes by the sets of nodes of which runs failed, because a run that failed often fails again."""
    failed = {tuple(sorted(run.hosts)) for run in logs.failed}
    tried = failed | {tuple(sorted(run.hosts)) for run in logs.runs}
    counts = Counter(node for nodes in failed for node in nodes)
    health.failed = dict(sorted(counts.items(), key=lambda one: (-one[1], one[0])))
    for node, number in health.failed.items():
        of = sum(node in nodes for nodes in tried)
        rate = max(LEAST_FAILURES, (len(failed) - number) / max(1, len(tried) - of))
        if len(health.nodes) >= FEWEST and _tail(number, of, rate) * len(health.nodes) < CHANCE:
            health.failing.append(FailingNode(node, number, of))


def _tail(number: int, of: int, rate: float) -> float:
    """Return the probability that *number* or more of *of* events happen, each with the probability *rate*."""
    return sum(math.comb(of, k) * rate**k * (1 - rate) ** (of - k) for k in range(number, of + 1))


def missing_pairs(health: Health, logs: Logs) -> list[tuple[str, str]]:
    """Return pairs that would decide which node of a slow pair is at fault.

    Its nodes with some that are not slow, up to `FEWEST` pairs of each.
    """
    done = {tuple(sorted(run.hosts)) for run in logs.runs if len(run.hosts) == 2}
    slow = {node for pair in health.slow_pairs for node in pair.nodes} | {one.node for one in health.slow_nodes}
    healthy = [node for node in health.nodes if node not in slow]
    wanted: list[tuple[str, str]] = []
    for pair in health.slow_pairs:
        for node in pair.nodes:
            has = sum(node in other for other in done | set(wanted))
            for other in healthy:
                key = (min(node, other), max(node, other))
                if has < FEWEST and key not in done and key not in wanted:
                    wanted.append(key)
                    has += 1
    return wanted


def add_parser(subparsers: Any) -> None:
    """Declare `distsim health`."""
    parser = subparsers.add_parser(
        "health",
        description="Compare nodes with each other: in runs of two nodes, each pair with equal runs of other pairs; in "
        "runs of one node, each node with the others. With --on, all of them are compared with the model of such a "
        "cluster, too.\n"
        "Exit code 5 if a node is slower or fails more often than the others, or all are far below such a cluster.",
    )
    parser.add_argument(
        "logs", metavar="LOGS", help="folder of logs of nccl-tests or rccl-tests (also below it), or one"
    )
    parser.add_argument(
        "--on",
        metavar="CLUSTER",
        help="compare the median of all runs with this cluster: best the file of distsim calibrate --from logs of a "
        "healthy day, or a preset",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Read the logs, compare, print; return 5 if a node is named or all are far below the model, else 0."""
    from distsim.calibration.logs.folder import agreed, read_logs
    from distsim.text.untrusted_input import printable

    logs = agreed(read_logs(Path(args.logs)))
    health = examine(logs)
    missing = missing_pairs(health, logs)
    document = {"schema": SCHEMA, **asdict(health), "runs": len(logs.runs), "deciding_pairs": missing}
    lines, is_below = text(health, logs, missing), False
    if args.on is not None:
        from distsim.calibration.expectation import compare_with_model, expectation_text

        cells, notes = compare_with_model(logs, args.on)
        is_below = any(cell.is_below for cell in cells)
        document["expected"] = [asdict(cell) for cell in cells]
        lines += [*expectation_text(cells, args.on), *(f"note: {printable(note)}" for note in notes)]
    print(json.dumps(document, indent=1) if args.json else "\n".join(lines))
    return 5 if health.is_sick or is_below else 0


def text(health: Health, logs: Logs, missing: Sequence[tuple[str, str]] = ()) -> list[str]:
    """Return the report as lines of at most 80 columns where names allow it."""
    rows: list[tuple[str, ...]] = []
    for node in health.slow_nodes:
        pairs = f"{node.slow_pairs} of {node.pairs}" if node.pairs else "-"
        pairs += "" if node.is_certain else " ?"
        rows.append((node.node, node.op, str(node.gpus), node.size, pairs, f"+{node.slower:.0%}"))
    for one in health.slow_pairs[:MOST_SHOWN]:
        rows.append((" ".join(one.nodes), one.op, str(one.gpus), one.size, "pair", f"+{one.slower:.0%}"))
    lines = []
    if rows:
        head = ("node", "op", "GPUs", "size", "slow pairs", "slower")
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        for row in (head, *rows):
            cells = [f"{cell:>{width}}" if at in (2, 5) else f"{cell:<{width}}"
                     for at, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
            lines.append("  ".join(cells).rstrip())
    if len(health.slow_pairs) > MOST_SHOWN:
        lines.append(f"and {len(health.slow_pairs) - MOST_SHOWN} more slow pairs: --json has all")
    lines += [
        f"{one.node} fails more often than the others: with {one.failed} of {one.tried} partners"
        for one in health.failing
    ]
    if not all(node.is_certain for node in health.slow_nodes):
        lines.append("?: a node that is alone behind another switch looks the same; it would be certain")
        lines.append(f"   among {ENOUGH} nodes, or among {MANY} if sendrecv and alltoall agree in all runs")
    if health.slow_pairs:
        lines.append(
            "a slow pair: the path between two nodes, or tests that ran at once; neither node is at fault by it"
        )
    if missing:
        lines.append(f"run these to decide: {', '.join(f'{one} with {other}' for one, other in missing[:6])}")
    compared = [cell.spread for cell in health.cells if not cell.unknown]
    noise = f"; times differ by {min(compared):.1%} to {max(compared):.1%}" if compared else ""
    files = len({run.file for run in logs.runs} | {run.file for run in logs.failed})
    lines.append(f"{plural(len(health.nodes), 'node')}, {plural(files, 'log')}, {plural(len(logs.runs), 'run')}{noise}")
    if health.failed:
        worst = ", ".join(f"{node} {number}" for node, number in list(health.failed.items())[:4])
        lines.append(f"{health.failed_runs} failed runs, by pairs: {worst}")
    unknown: dict[str, list[str]] = defaultdict(list)
    for cell in health.cells:
        if cell.unknown:
            unknown[cell.unknown].append(f"{cell.op} x {cell.gpus}")
    for reason, names in unknown.items():
        shown = ", ".join(dict.fromkeys(names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append(f"no verdict for {shown}: {reason}")
    if not health.slow_nodes and not health.failing and compared:
        lines.append("no node is slower than the others")
    return lines


MOST_SHOWN = 12
"""Largest number of slow pairs in the table."""
