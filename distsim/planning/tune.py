"""`distsim tune SCRIPT --vary ...`: searches the settings of a training script for the best layout."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.errors import UsageError
from distsim.planning.command import AFTER_SCRIPT as AFTER_SCRIPT
from distsim.planning.command import Space, add_point_flags, space_of
from distsim.planning.command import rewritten as rewritten
from distsim.text.output_files import write_json
from distsim.text.units import plural, seconds_of

if TYPE_CHECKING:
    from distsim.planning.points import KeptPoints
    from distsim.planning.search import Place, Search
    from distsim.planning.variations import Point

MOST_ROWS = 10
MOST_FAILURES = 6
DESCRIPTION = """\
Search the settings of a training script for the best layout.

  distsim tune --on dgx-h100:8 --vary --tp=1,2,4,8 --vary --mbs=1,2,4 --vary --ckpt=none,selective train.py --layers 32

Each point runs for two steps, the best ones for four. Points near the best come first. What runs out of memory rules
out what needs as much: larger micro-batches, longer sequences, less tensor parallelism, less recomputation, fewer
nodes. A sample of the ranks stands for all. Points that have ended are kept for a day: after Ctrl-C, or with a larger
--budget, the same command goes on.
"""


def add_parser(subparsers: Any) -> None:
    """Add `tune`."""
    parser = subparsers.add_parser(
        "tune",
        description=DESCRIPTION,
        usage="distsim tune [flags] --vary --FLAG=A,B [--vary ...] SCRIPT [script's own arguments]",
    )
    parser.add_argument("scenario", metavar="SCRIPT", help="the training script (.py)")
    add_point_flags(parser, "--FLAG=A,B", "a page with step time over memory of every point")
    parser.add_argument(
        "--budget", default="30m", metavar="TIME", help="wall time after which no more points begin (default: 30m)"
    )
    parser.add_argument(
        "--objective",
        choices=("tokens/s", "cost", "memory"),
        default="tokens/s",
        help="what to optimize: most tokens/s per GPU, least cost of a token, or least peak memory (default: tokens/s)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Search, and print the best layout, the runner-up and why."""
    from distsim.planning.search import Objective, Search, axis_of
    from distsim.planning.variations import write_csv
    from distsim.scenario.pool import opened

    deadline_s = time.monotonic() + seconds_of(args.budget)
    if not args.scenario.endswith(".py"):
        raise UsageError(f"expected a training script (.py), got {args.scenario}")
    space = space_of(args, "--FLAG=A,B")
    gpu = space.scenario.cluster.node.gpu
    if args.objective == "cost" and not space.prices and (gpu is None or gpu.price is None):
        raise UsageError("--objective cost: expected --price AMOUNT of a GPU's hour, or price in the cluster file")
    search = Search([axis_of(variation) for variation in space.variations], Objective(args.objective))
    kept = space.kept()
    try:
        with opened(space.pool):
            _run_points(search, space, kept, deadline_s)
    except KeyboardInterrupt:
        if search.results:
            _print(search, args)
            print(f"distsim: interrupted after {plural(len(search.results), 'point')}{kept.continues}", file=sys.stderr)
        raise
    points = _print(search, args)
    if search.untried:
        print(
            f"distsim: --budget {args.budget} is over, {plural(len(search.untried), 'point')} not tried; what has run "
            f"is kept in {kept.folder}: the same command with a larger --budget continues from there",
            file=sys.stderr,
        )
    if args.csv is not None:
        write_csv(points, Path(args.csv))
    write_json("--json", args.json, _document(search, points), sort_keys=True)
    if args.html is not None:
        _write_page(search, points, args)
    if not search.ranking():
        raise UsageError(f"no point is valid ({_remedy(points)}")
    return 0


def _run_points(search: Search, space: Space, kept: KeptPoints, deadline_s: float) -> None:
    """Run the points that *search* asks for whenever one has ended, until it has all or the budget is over; then run
    the best points for more steps.
    """
    from distsim.planning.search import FINAL_STEPS, FIRST_STEPS
    from distsim.planning.tables import live_points
    from distsim.planning.variations import run_kept
    from distsim.scenario.pool import one_by_one

    longest_s, ended = 0.0, list[Any]()

    def ask(most: int) -> list[tuple[Place, dict[str, Any]]]:
        # The finalists run twice as long as any point has so far: their time is set aside.
        if time.monotonic() + 2.0 * longest_s >= deadline_s:
            return []
        return [(point, search.settings(point)) for point in search.next_points(most)]

    with live_points(len(search.untried), space.pool) as show:
        for point, result in run_kept(space.scenario, ask, kept, space.pool, last_step=FIRST_STEPS):
            search.add(point, space.priced(search.settings(point), result))
            longest_s = max(longest_s, result.wall_s)
            ended.append(_point(search, point))
            show(ended)
    places = [choice for choice in search.finalists() if choice not in search.finals]
    settings = [search.settings(choice) for choice in places]
    for number, result in run_kept(space.scenario, one_by_one(settings), kept, space.pool, last_step=FINAL_STEPS):
        search.finals[places[number]] = space.priced(settings[number], result)


def _point(search: Search, point: Place) -> Point:
    from distsim.planning.variations import Point

    return Point(search.settings(point), search.finals.get(point, search.results[point]))


def _print(search: Search, args: argparse.Namespace) -> list[Point]:
    """Print the result; return all points, the best first and failed ones last."""
    from rich.table import Table
    from rich.text import Text

    from distsim.planning.tables import failure, points_console, print_failures, training_table

    ranking = search.ranking()
    failed = [choice for choice in search.results if choice not in ranking]
    points = [_point(search, choice) for choice in [*ranking, *failed]]
    if not points:
        return points
    console = points_console()
    if ranking:
        lines = Table.grid(padding=(0, 2))
        for word, text in _verdict(search, points, args.objective):
            lines.add_row(Text(word, style="bold"), Text(text))
        console.print(lines)
        console.print(training_table(points[: min(MOST_ROWS, len(ranking))], in_order=True))
    stepless = sum(not failure(point) for point in points[len(ranking) :])
    ran = len(search.results)
    fits = len(ranking) + stepless
    counts = [f"{plural(ran, 'point')} ran", f"{fits} of them {'fits' if fits == 1 else 'fit'}"]
    if stepless:
        counts.append(f"{stepless} of these ended without a step that could be compared")
    if search.ruled_out:
        counts.append(
            f"{len(search.ruled_out)} were skipped, because they need as much memory as a point that ran out of it"
        )
    if search.untried:
        counts.append(f"{len(search.untried)} were not tried")
    console.print("; ".join(counts))
    print_failures(console, points[len(ranking) :][:MOST_FAILURES], _reason)
    if len(failed) > MOST_FAILURES:
        console.print(f"and {len(failed) - MOST_FAILURES} more that failed: --csv FILE has all")
    return points


def _reason(point: Point) -> str:
    """Return why the point is not ranked."""
    from distsim.planning.tables import failure

    return failure(point) or "it finished, but no optimizer completed a step on a GPU, so there is nothing to compare"


def _remedy(points: Sequence[Point]) -> str:
    """Return why none of *points* is ranked, and what to do: other values do not help a script that does not train."""
    from distsim.planning.tables import failure, named

    finished = next((point for point in points if not failure(point)), None)
    if finished is None:
        return f"the first one: {_reason(points[0])}); vary other values"
    name = "the first one" if finished is points[0] else named(finished)
    return f"{name}: {_reason(finished)}); tune a script that trains on GPUs (calls optimizer.step)"


def _verdict(search: Search, points: Sequence[Point], objective: str) -> list[tuple[str, str]]:
    """Return the best point, the runner-up and their difference, each as a word and its text."""
    from distsim.planning.search import difference, spent
    from distsim.planning.tables import ALIKE, as_good, named, tight_text

    best = points[0]
    lines = [("best", named(best)), ("", spent(best.result))]
    if tight := tight_text(best.result.figures):
        lines.append(("", f"{tight}: see distsim fits"))
    if len(search.ranking()) < 2:
        return lines
    second = points[1]
    lines += [("runner-up", named(second)), ("", difference(best.result, second.result, objective))]
    alike = as_good(list(points[: len(search.ranking())]))
    if objective != "memory" and alike:
        lines.append(("", f"{'the runner-up' if alike == 1 else f'the next {alike}'} {ALIKE}"))
    return lines


def _document(search: Search, points: Sequence[Point]) -> dict[str, Any]:
    """Return the JSON document (distsim.planning.schema.TuneReport)."""
    from distsim.planning.tables import as_good
    from distsim.planning.variations import point_json

    fitting = len(search.ranking())
    return {
        "schema": "distsim.tune/1",
        "objective": search.objective.name,
        "points": [
            point_json(point, valid=number < fitting, why=_reason(point) if number >= fitting else "")
            for number, point in enumerate(points)
        ],
        "cannot_be_told_apart": as_good(list(points[:fitting])) if fitting else 0,
        "ruled_out": [search.settings(choice) for choice in search.ruled_out],
        "untried": [search.settings(choice) for choice in search.untried],
    }


def _write_page(search: Search, points: Sequence[Point], args: argparse.Namespace) -> None:
    from distsim.report.html.page import tune_page, write_page
    from distsim.scenario.expect.result import entry

    fitting = len(search.ranking())
    lines = _verdict(search, points, args.objective) if fitting else [("", "No point is valid.")]
    entries = [entry(point.result, point.settings) for point in points]
    for one in entries:
        one.document = {}
    write_page(tune_page(args.scenario, entries, [f"{word} {text}".strip() for word, text in lines]), args.html)
