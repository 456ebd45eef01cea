"""`distsim tune SCRIPT --vary ...`: searches the settings of a training script for the best layout."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.cli.dispatch import HelpFormatter
from distsim.cli.plan.sweep import AFTER_SCRIPT as AFTER_SCRIPT
from distsim.cli.plan.sweep import OF_SCRIPT, as_good, best_table, failure, live_points, training_table
from distsim.cli.plan.sweep import rewritten as rewritten
from distsim.cli.run import price_of
from distsim.errors import UsageError
from distsim.options import add_flags, default_of
from distsim.text.output_files import check_writable, say_written

if TYPE_CHECKING:
    from distsim.scenario.explore.points import KeptPoints
    from distsim.scenario.explore.sweep import Point
    from distsim.scenario.explore.tune import Place, Search
    from distsim.scenario.file.load import Scenario

__all__ = ["add_parser", "rewritten"]

MOST_ROWS = 10
MOST_FAILURES = 6
DESCRIPTION = """\
Search the settings of a training script for the best layout.

  distsim tune --on dgx-h100:8 --vary --tp=1,2,4,8 --vary --mbs=1,2,4 --vary --ckpt=none,selective train.py --layers 32

Each point runs for two steps, the best ones for four. Points near the best come first. What runs out of memory rules
out what needs as much: larger micro-batches, longer sequences, less tensor parallelism, less recomputation, fewer
nodes. A sample of the ranks stands for all. Points that have ended are kept until all have: after Ctrl-C, or with a
larger --budget, the same command goes on.
"""


def add_parser(subparsers: Any) -> None:
    """Add `tune`."""
    parser = subparsers.add_parser(
        "tune",
        help="search the settings of a training script for the best layout",
        description=DESCRIPTION,
        formatter_class=HelpFormatter,
        usage="distsim tune [flags] --vary --FLAG=A,B [--vary ...] SCRIPT [script's own arguments]",
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script (.py)")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="--FLAG=A,B",
        help="a flag of the script; may be given several times",
    )
    parser.add_argument("--on", metavar="CLUSTER,...", help="clusters, as a further setting that varies")
    parser.add_argument(
        "--budget", default="30m", metavar="TIME", help="wall time after which no more points begin (default: 30m)"
    )
    parser.add_argument(
        "--objective",
        choices=("tokens/s", "cost", "memory"),
        default="tokens/s",
        help="what to optimize: most tokens/s per GPU, least cost of a token, or least peak memory (default: tokens/s)",
    )
    parser.add_argument("--price", metavar="AMOUNT", help="price of one GPU hour, for the cost of tokens")
    parser.add_argument(
        "-n",
        dest="workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="WORKERS",
        help="processes (default: all cores)",
    )
    add_flags(parser, *OF_SCRIPT)
    parser.add_argument("--csv", metavar="FILE", help="all figures of all points")
    parser.add_argument("--json", metavar="FILE", help="the same as JSON (schema distsim.tune/1)")
    parser.add_argument("--html", metavar="FILE", help="a page with step time over memory of every point (extra: html)")
    parser.add_argument("--script-arguments", help=argparse.SUPPRESS)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Search, and print the best layout, the runner-up and why."""
    from distsim.scenario.explore.points import KeptPoints
    from distsim.scenario.explore.sweep import parse_variation, script, write_csv
    from distsim.scenario.explore.tune import Objective, Search, axis_of, seconds_of

    budget_s = seconds_of(args.budget)
    if args.workers < 1:
        raise UsageError(f"-n: expected at least one worker, got {args.workers}")
    for flag in ("csv", "json"):
        check_writable(getattr(args, flag), f"--{flag}", f"tune.{flag}")
    if args.html is not None:
        from distsim.report.html import check_page

        check_page(args.html)
    if not args.script.endswith(".py"):
        raise UsageError(f"expected a training script (.py), got {args.script}")
    given = {name: getattr(args, name) for name in OF_SCRIPT if getattr(args, name) != default_of(name)}
    clusters = [] if args.on is None else args.on.split(",")
    if clusters:
        given["on"] = clusters[0]
    scenario = script(Path(args.script), shlex.split(args.script_arguments or ""), **given)
    price, gpu = price_of(args.price), scenario.cluster.node.gpu
    if args.objective == "cost" and price is None and (gpu is None or gpu.price is None):
        raise UsageError("--objective cost: expected --price AMOUNT of a GPU's hour, or price in the cluster file")
    words = ([f"on={args.on}"] if len(clusters) > 1 else []) + args.vary
    if not words:
        raise UsageError("nothing to vary: expected --vary --FLAG=A,B, or several clusters after --on")
    search = Search([axis_of(parse_variation(text)) for text in words], Objective(args.objective, price))
    kept = KeptPoints(scenario, [[axis.path, axis.values] for axis in search.axes])
    if len(kept):
        print(f"distsim: {len(kept)} points kept from before, in {kept.folder}", file=sys.stderr)
    runner = _Runner(scenario, search, kept, args, time.monotonic() + budget_s)
    try:
        runner.run()
    except KeyboardInterrupt:
        _say_interrupted(search, price, args, kept)
        raise
    points = _print(search, price, args)
    if search.untried:
        print(
            f"distsim: --budget {args.budget} is over, {len(search.untried)} points were not tried; what has run is "
            f"kept in {kept.folder}: the same command with a larger --budget continues from there",
            file=sys.stderr,
        )
    else:
        kept.discard()
    if args.csv is not None:
        write_csv(points, Path(args.csv))
    if args.json is not None:
        Path(args.json).write_text(json.dumps(_document(search, points, price), indent=1, sort_keys=True) + "\n")
    if args.html is not None:
        _write_page(search, points, args)
    if not search.ranking():
        raise UsageError(f"no point is valid ({_remedy(points)}")
    return 0


class _Runner:
    """Runs the points that a search asks for until it has all, or the budget is over."""

    def __init__(
        self, scenario: Scenario, search: Search, kept: KeptPoints, args: argparse.Namespace, deadline_s: float
    ) -> None:
        from distsim.watchdog.process import can_watch

        self._scenario, self._search, self._kept = scenario, search, kept
        self._workers, self._deadline_s = args.workers, deadline_s
        self._apart = args.own_process and can_watch()
        self._longest_s = 0.0

    def run(self) -> None:
        """Run rounds of as many points as there are workers, then run the best points for more steps."""
        from distsim.scenario.explore.tune import FINAL_STEPS, FIRST_STEPS

        search = self._search
        ended: list[Point] = []
        with live_points(len(search.untried), best_table) as show:

            def add(point: Place, result: Any) -> None:
                search.add(point, result)
                ended.append(_point(search, point))
                show(ended)

            # The finalists run twice as long as any point has so far: their time is set aside.
            while time.monotonic() + 2.0 * self._longest_s < self._deadline_s:
                places = search.next_points(self._workers)
                if not places:
                    break
                self._round(places, FIRST_STEPS, add)
        finalists = [choice for choice in search.finalists() if choice not in search.finals]
        self._round(finalists, FINAL_STEPS, lambda point, result: search.finals.update({point: result}))

    def _round(self, places: Sequence[Place], last_step: int, add: Callable[[Place, Any], None]) -> None:
        from distsim.scenario.explore.points import run_points
        from distsim.scenario.explore.sweep import point_of

        search, stage, left = self._search, f"{last_step} steps", []
        for point in places:
            result = self._kept.load(search.settings(point), stage)
            if result is None:
                left.append(point)
            else:
                add(point, result)
        scenarios = [point_of(self._scenario, search.settings(point)) for point in left]
        for number, result in run_points(scenarios, self._workers, self._apart, last_step=last_step):
            self._kept.save(search.settings(left[number]), result, stage)
            self._longest_s = max(self._longest_s, result.wall_s)
            add(left[number], result)


def _point(search: Search, point: Place) -> Point:
    from distsim.scenario.explore.sweep import Point

    return Point(search.settings(point), search.finals.get(point, search.results[point]))


def _say_interrupted(search: Search, price: float | None, args: argparse.Namespace, kept: KeptPoints) -> None:
    """Print what was found before Ctrl-C, if any point has ended."""
    if search.results:
        _print(search, price, args)
        print(
            f"distsim: interrupted after {len(search.results)} points; they are kept in {kept.folder}: the same "
            "command continues from there",
            file=sys.stderr,
        )


def _print(search: Search, price: float | None, args: argparse.Namespace) -> list[Point]:
    """Print the result; return all points, the best first and failed ones last."""
    from rich.table import Table
    from rich.text import Text

    from distsim.debug.report.console import Console, piped_width

    ranking = search.ranking()
    failed = [choice for choice in search.results if choice not in ranking]
    points = [_point(search, choice) for choice in [*ranking, *failed]]
    if not points:
        return points
    console = Console(width=None if sys.stdout.isatty() else piped_width(160))
    if ranking:
        lines = Table.grid(padding=(0, 2))
        for word, text in _verdict(search, points, args.objective):
            lines.add_row(Text(word, style="bold"), Text(text))
        console.print(lines)
        console.print(training_table(points[: min(MOST_ROWS, len(ranking))], price, in_order=True))
    stepless = sum(not failure(point) for point in points[len(ranking) :])
    ran = len(search.results)
    counts = [f"{ran} {'point' if ran == 1 else 'points'} ran", f"{len(ranking) + stepless} of them fit"]
    if stepless:
        counts.append(f"{stepless} of these ended without a step that could be compared")
    if search.ruled_out:
        counts.append(
            f"{len(search.ruled_out)} were skipped, because they need as much memory as a point that ran out of it"
        )
    if search.untried:
        counts.append(f"{len(search.untried)} were not tried")
    console.print("; ".join(counts))
    for point in points[len(ranking) :][:MOST_FAILURES]:
        console.print(f"{_named(point)}: {_reason(point)}")
    if len(failed) > MOST_FAILURES:
        console.print(f"and {len(failed) - MOST_FAILURES} more that failed: --csv FILE has all")
    return points


def _reason(point: Point) -> str:
    """Return why the point is not ranked."""
    return failure(point) or "it finished, but no optimizer completed a step on a GPU, so there is nothing to compare"


def _remedy(points: Sequence[Point]) -> str:
    """Return why none of *points* is ranked, and what to do: other values do not help a script that does not train."""
    finished = next((point for point in points if not failure(point)), None)
    if finished is None:
        return f"the first one: {_reason(points[0])}); vary other values"
    name = "the first one" if finished is points[0] else _named(finished)
    return f"{name}: {_reason(finished)}); tune a script that trains on GPUs (calls optimizer.step)"


def _named(point: Point) -> str:
    return " ".join(f"{name}={value}" for name, value in point.settings.items())


def _verdict(search: Search, points: Sequence[Point], objective: str) -> list[tuple[str, str]]:
    """Return the best point, the runner-up and their difference, each as a word and its text."""
    from distsim.collectives.uncertainty import memory_error
    from distsim.scenario.explore.tune import difference, spent

    best = points[0]
    lines = [("best", _named(best)), ("", spent(best.result))]
    share = best.result.figures.get("gpu_memory_share", 0.0)
    worst = memory_error().worst
    if share > 1.0 - worst:
        lines.append(
            (
                "",
                f"its peak, {share:.0%} of the memory, is within the error of predicted peaks ({worst:.1%} at "
                "most): see distsim fits",
            )
        )
    if len(search.ranking()) < 2:
        return lines
    second = points[1]
    lines += [("runner-up", _named(second)), ("", difference(best.result, second.result, objective))]
    alike = as_good(list(points[: len(search.ranking())]))
    if objective != "memory" and alike:
        others = "the runner-up" if alike == 1 else f"the next {alike}"
        lines.append(
            (
                "",
                f"{others} cannot be distinguished from the best: the error of their step times is as large as the "
                "difference",
            )
        )
    return lines


def _document(search: Search, points: Sequence[Point], price: float | None) -> dict[str, Any]:
    """Return the JSON document with the schema distsim.tune/1.

    Its keys are `objective`, `price`, `points[]` (the best first, failed ones last; each with `settings`, `valid`,
    `why` it is not valid, `steps` that it ran, and `figures`), `cannot_be_told_apart` (how many points after the
    best one are within the error of its figure), and `ruled_out[]` and `untried[]` (by their settings).
    """
    fitting = len(search.ranking())
    return {
        "schema": "distsim.tune/1",
        "objective": search.objective.name,
        "price": price,
        "points": [
            {
                "settings": point.settings,
                "valid": number < fitting,
                "why": _reason(point) if number >= fitting else "",
                "verdict": point.result.verdict,
                "figures": point.result.figures,
            }
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
    try:
        write_page(tune_page(args.script, entries, [f"{word} {text}".strip() for word, text in lines]), args.html)
    except OSError as error:
        raise UsageError(f"--html {args.html}: cannot be written ({error.strerror})") from None
    say_written(args.html)
