"""`distsim buy --on KIND,... --tokens N SCRIPT`: compares machines for a training, by time and by money."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distsim.cluster.files.load import kind_of
from distsim.errors import UsageError
from distsim.planning.command import Space, add_point_flags, node_range, space_of
from distsim.planning.command import rewritten as rewritten
from distsim.report.training.goodput import add_failure_flags, asks_for_goodput, failures_of
from distsim.text.output_files import open_output, write_json, written
from distsim.text.units import count_of, seconds_of

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.planning.buy.offers import MachineComparison
    from distsim.planning.buy.plan import MachinePoints
    from distsim.report.training.goodput import FailurePlan

AFTER_SCRIPT = (
    *("--on", "--tokens", "--deadline", "--budget", "--nodes", "--vary", "--price"),
    *("--csv", "--json", "--html"),
    *("--mtbf", "--failures", "--checkpoint-every", "--checkpoint-takes", "--detect", "--restart"),
)
"""Flags that are distsim's even after the script, unless the script has one of that name."""
NOTHING_MEETS = 5
DESCRIPTION = """\
Compare machines for a training: for each kind the fewest nodes on which the script fits, and 2, 4 and 8 times as many
while that is worth it; each with its time, its cost, and what bounds it.

  distsim buy --on dgx-h100,dgx-b200,aws-p4de --tokens 1T train.py --size 70b
  distsim buy --on dgx-h100,dgx-b200 --tokens 1T --deadline 30d --budget 2M --vary --tp=1,2,4 train.py

With --mtbf (or --failures), days and money include checkpoints, lost steps and downtime.
With --vary, each number of nodes has its best layout: all are tried on the fewest nodes, and on twice as many the two
best ones and those that did not fit. Points are kept for a day and shared with tune: another price or deadline needs no
simulation.

exit codes: 0 there is a recommendation, 5 nothing meets the deadline or the budget, 2 usage, or nothing fits
"""


def add_parser(subparsers: Any) -> None:
    """Add `buy`."""
    parser = subparsers.add_parser(
        "buy",
        description=DESCRIPTION,
        usage="distsim buy --on KIND,... --tokens N [flags] SCRIPT [script's own arguments]",
    )
    parser.add_argument("scenario", metavar="SCRIPT", help="the training script (.py)")
    add_point_flags(parser, "--FLAG=A,B", "a page with the recommendation, cost over time, and all offers")
    parser.add_argument("--tokens", metavar="N", help="of the whole training, such as 1T or 300B")
    parser.add_argument("--deadline", metavar="TIME", help="longest time of the training, such as 30d")
    parser.add_argument("--budget", metavar="AMOUNT", help="largest cost, such as 2M, in the currency of the prices")
    add_failure_flags(parser)
    parser.add_argument("--nodes", default="1..64", metavar="A..B", help="fewest and most nodes (default: 1..64)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Compare, print the recommendation and the offers, and write the files.

    Return 0, or 5 if no offer meets the deadline or the budget.
    """
    from distsim.planning.buy.show import print_offers

    if not args.scenario.endswith(".py"):
        raise UsageError(f"expected a training script (.py), got {args.scenario}")
    plan = failures_of(args) if asks_for_goodput(args) else None
    tokens, limits = count_of(args.tokens or "", "--tokens", "1T, the tokens of the whole training"), _limits(args)
    kinds = _kinds(args.on)
    space = space_of(args, None)
    clusters = _clusters(kinds, space)
    comparison = _compare(space, clusters, tokens, limits, args, plan)
    print_offers(comparison)
    _write_files(args, comparison)
    return 0 if comparison.recommended else NOTHING_MEETS


def _limits(args: argparse.Namespace) -> dict[str, float]:
    limits = {}
    if args.deadline is not None:
        limits["seconds"] = seconds_of(args.deadline, "--deadline", "30d, 6w or 12h")
    if args.budget is not None:
        limits["amount"] = count_of(args.budget, "--budget", "2M, an amount of money")
    return limits


def _kinds(on: str | None) -> list[str]:
    kinds = list(dict.fromkeys(word.strip() for word in (on or "").split(",") if word.strip()))
    if not kinds:
        raise UsageError("--on: expected kinds of machine, such as dgx-h100,dgx-b200 (distsim topo lists them)")
    for kind in kinds:
        if kind_of(kind) != kind:
            raise UsageError(
                f"--on {kind}: expected a kind of machine, {kind_of(kind)}; the number of nodes is searched, and "
                "--nodes A..B limits it"
            )
    return kinds


def _clusters(kinds: Sequence[str], space: Space) -> dict[str, Cluster]:
    """Return the cluster of each kind of machine; it has GPUs and a price."""
    from distsim.cluster import load_cluster

    clusters = {kind: load_cluster(kind) for kind in kinds}
    gpus = {kind: cluster.node.gpu for kind, cluster in clusters.items()}
    if lacking := [kind for kind, gpu in gpus.items() if gpu is None]:
        raise UsageError(f"--on {lacking[0]}: expected a machine with GPUs")
    unpriced = [
        kind
        for kind, gpu in gpus.items()
        if gpu is not None and gpu.price is None and kind not in space.prices and "" not in space.prices
    ]
    if unpriced:
        flags = ",".join(f"{kind}=AMOUNT" for kind in unpriced)
        raise UsageError(f"no list price of {', '.join(unpriced)}: give that of a GPU hour, --price {flags}")
    return clusters


def _compare(
    space: Space,
    clusters: Mapping[str, Cluster],
    tokens: float,
    limits: Mapping[str, float],
    args: argparse.Namespace,
    plan: FailurePlan | None,
) -> MachineComparison:
    """Simulate, and return the offers and the choice among them; the chosen ones run for more steps."""
    from distsim.planning.buy.offers import MachineComparison, choose, offer_of
    from distsim.planning.buy.plan import plan_machine, run_finals, run_plans
    from distsim.planning.search import axis_of
    from distsim.planning.tables import live_points
    from distsim.scenario.pool import opened

    axes = [axis_of(one) for one in space.variations if one.path != "on"]
    nodes, kept = node_range(args.nodes), space.kept()
    try:
        with opened(space.pool):
            with live_points(None, space.pool) as show:
                plans = {kind: plan_machine(kind, axes, nodes) for kind in clusters}
                machines = run_plans(space, plans, kept, show)
            _refuse(machines, args.scenario, nodes)
            finals = set[int]()
            while True:
                rows = [(machine.kind, point) for machine in machines for point in machine.rows]
                offers = [offer_of(point, tokens, clusters[kind], plan) for kind, point in rows]
                choices = choose(offers, limits)
                points = {id(choice.offer.point): choice.offer.point for choice in choices}
                if finals.issuperset(points):
                    return MachineComparison(args.scenario, tokens, limits, nodes, offers, choices, machines)
                run_finals(space, [point for key, point in points.items() if key not in finals], kept)
                finals.update(points)
    except KeyboardInterrupt:
        print(f"distsim: interrupted{kept.continues}", file=sys.stderr)
        raise


def _refuse(machines: Sequence[MachinePoints], script: str, nodes: tuple[int, int]) -> None:
    """Raise UsageError if there is no offer, or if the script does not say what a step is."""
    from distsim.planning.buy.offers import misfit_text
    from distsim.planning.tables import failure, points_console, print_tracebacks

    points = [point for machine in machines for point in (*machine.rows, *machine.failed.values())]
    if any(not failure(point) and not point.result.figures.get("step_s") for point in points):
        raise UsageError(
            f"{script}: it finished, but no optimizer completed a step on a GPU; expected a script that trains on GPUs "
            "(calls optimizer.step)"
        )
    rows = [point for machine in machines for point in machine.rows]
    if any("tokens_per_s" not in point.result.figures for point in rows):
        how = rows[0].result.document.get("training", {}).get("tokens_how", "")
        raise UsageError(f"{script}: the tokens of a step are not known ({how}), so that --tokens has no time")
    if not rows:
        print_tracebacks(points_console(), points)
        raise UsageError("; ".join(misfit_text(machine, nodes) for machine in machines))


def _write_files(args: argparse.Namespace, comparison: MachineComparison) -> None:
    from distsim.planning.buy.offers import offer_json

    rows = [offer_json(offer) for offer in comparison.offers]
    if args.csv is not None:
        with written("--csv", args.csv), open_output(args.csv) as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    write_json("--json", args.json, comparison.document(), sort_keys=True)
    if args.html is not None:
        from distsim.planning.buy.show import page_of
        from distsim.report.html.page import write_page

        write_page(page_of(comparison), args.html)
