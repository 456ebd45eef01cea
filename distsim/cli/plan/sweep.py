"""`distsim sweep SCENARIO --vary PATH=A,B,C`: one scenario under every combination of some settings."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.cli.dispatch import HelpFormatter
from distsim.cli.run import price_of
from distsim.errors import UsageError
from distsim.options import add_flags, default_of
from distsim.text.output_files import check_writable, say_written

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from distsim.scenario.explore.sweep import Point, Variation
    from distsim.scenario.file.load import Scenario

__all__ = [
    "add_parser",
    "as_good",
    "as_table",
    "best_table",
    "failure",
    "live_points",
    "rewritten",
    "tokens_rate",
    "training_columns",
    "training_table",
]

MOST_LIVE = 12
"""Rows of the table that a terminal shows while points run."""
WHOLE = 16
"""Width up to which a column of a setting is not wrapped."""
DESCRIPTION = """\
Run one scenario, or one script, under every combination of some settings, and compare.

  distsim sweep step.toml --vary cluster.nodes=1,2,4,8
  distsim sweep step.toml --vary cluster.nodes=2,4 --vary faults[0].factor=1,0.5,0.1 --csv out.csv
  distsim sweep --on dgx-h100:8,hgx-h200:8 --vary --tp=1,2,4,8 --vary --mbs=1,2 train.py --layers 32

PATH is a key of the scenario file, cluster.nodes, or a flag of the script (--tp). What the file expects is not
checked. Points run side by side. Training steps are sorted by tokens/s per GPU, and the best one is marked.
"""


def add_parser(subparsers: Any) -> None:
    """Add `sweep`."""
    parser = subparsers.add_parser(
        "sweep",
        help="run one scenario or script under many settings",
        description=DESCRIPTION,
        formatter_class=HelpFormatter,
        usage="distsim sweep [flags] --vary PATH=A,B [--vary ...] SCENARIO | SCRIPT [script's own arguments]",
    )
    parser.add_argument("scenario", metavar="SCENARIO|SCRIPT", help="a scenario file (.toml), or a script (.py)")
    parser.add_argument("--vary", action="append", default=[], metavar="PATH=A,B", help="may be given several times")
    parser.add_argument(
        "-n",
        dest="workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="WORKERS",
        help="processes (default: all cores)",
    )
    parser.add_argument("--ray", nargs="?", const="local", metavar="ADDRESS", help="on a Ray cluster (extra: ray)")
    parser.add_argument("--price", metavar="AMOUNT", help="price of one GPU hour, for the cost of tokens")
    parser.add_argument("--csv", metavar="FILE", help="all figures of all points")
    parser.add_argument("--json", metavar="FILE", help="the same as JSON (schema distsim.sweep/1)")
    parser.add_argument("--plot", metavar="FILE", help="a picture (extra: plot)")
    parser.add_argument("--html", metavar="FILE", help="a page with bars and every run (extra: html)")
    parser.add_argument(
        "--figure",
        default="virtual_time_s",
        metavar="NAME",
        help="figure of the plot and the page (default: virtual_time_s)",
    )
    of_script = parser.add_argument_group("where a script runs (a scenario file contains it)")
    of_script.add_argument("--on", metavar="CLUSTER,...", help="clusters, as a further setting that varies")
    add_flags(of_script, *OF_SCRIPT)
    of_script.add_argument("--script-arguments", help=argparse.SUPPRESS)
    parser.set_defaults(func=run)


AFTER_SCRIPT = ("--on", "--vary", "--budget", "--objective", "--price", "--csv", "--html", "--plot")
"""Flags that are distsim's even after the script, unless the script has one of that name."""
OF_SCRIPT = ("nnodes", "nproc_per_node", "fuse", "gpu_libraries", "fidelity")


def rewritten(argv: Sequence[str]) -> list[str]:
    """Return *argv* in a form that argparse accepts: `--vary --tp=1,2` becomes one word, and arguments after a
    script belong to the script.
    """
    words, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--vary" and rest and rest[0].startswith("-") and "=" in rest[0]:
            word += f"={rest.pop(0)}"
        words.append(word)
        if word.endswith(".py") and not word.startswith("-"):
            return [*words, f"--script-arguments={shlex.join(rest)}"]
    return words


def run(args: argparse.Namespace) -> int:
    """Run every point and print the table; 0 unless a setting does not fit."""
    from distsim.report.image import check_image, write_image
    from distsim.scenario.explore.sweep import parse_variation, write_csv, write_json

    if args.workers < 1:
        raise UsageError(f"-n: expected at least one worker, got {args.workers}")
    check_writable(args.csv, "--csv", "sweep.csv")
    check_writable(args.json, "--json", "sweep.json")
    check_image(args.plot)
    if args.html is not None:
        from distsim.report.html import check_page

        check_page(args.html)
    variations = [parse_variation(text) for text in args.vary]
    scenario = _scenario(args)
    price = price_of(args.price)
    clusters = [] if args.on is None else args.on.split(",")
    if len(clusters) > 1:
        variations.insert(0, parse_variation(f"on={args.on}"))
    if not variations:
        raise UsageError("nothing to vary: expected --vary PATH=A,B, or several clusters after --on")
    points = _points(scenario, variations, price, args)
    _table(points, price)
    if args.csv is not None:
        write_csv(points, Path(args.csv))
    if args.json is not None:
        write_json(points, args.scenario, args.json)
    if args.plot is not None:
        write_image(_plot(points, args.figure), args.plot)
    if args.html is not None:
        _write_page(points, args)
    if args.scenario.endswith(".py") and all(failure(point) for point in points):
        raise UsageError(f"no point is valid (the first one: {failure(points[0])}); vary other values")
    return 0


def _points(
    scenario: Scenario, variations: Sequence[Variation], price: float | None, args: argparse.Namespace
) -> list[Point]:
    """Run all points; for a script, print a line whenever one has ended."""
    from distsim.scenario.explore.points import KeptPoints
    from distsim.scenario.explore.sweep import sweep
    from distsim.watchdog.process import can_watch

    picture, total = args.html is not None, math.prod(len(v.values) for v in variations)
    kept = None
    if args.scenario.endswith(".py") and args.ray is None:
        kept = KeptPoints(scenario, [[v.path, v.values] for v in variations] + [picture])
        if len(kept):
            print(f"distsim: {len(kept)} of {total} points kept from before, in {kept.folder}", file=sys.stderr)
    points: list[Point] = []
    apart = args.own_process and can_watch()
    try:
        with live_points(total, best_table if kept is not None else None) as show:
            for point in sweep(scenario, variations, args.workers, args.ray, picture, apart, kept):
                points.append(point)
                show(points)
    except KeyboardInterrupt:
        if points:
            _table(points, price)
            folder = "" if kept is None else f"; they are kept in {kept.folder}: the same command continues from there"
            print(f"distsim: interrupted after {len(points)} of {total} points{folder}", file=sys.stderr)
        raise
    if kept is not None:
        kept.discard()
    return sorted(points, key=lambda point: point.number)


def _scenario(args: argparse.Namespace) -> Scenario:
    from distsim.scenario import load_scenario
    from distsim.scenario.explore.sweep import script

    given = {name: getattr(args, name) for name in OF_SCRIPT if getattr(args, name) != default_of(name)}
    if args.scenario.endswith(".py"):
        if args.on is not None:
            given["on"] = args.on.split(",")[0]
        return script(Path(args.scenario), shlex.split(args.script_arguments or ""), **given)
    if given or args.on is not None:
        name = "on" if args.on is not None else next(iter(given))
        raise UsageError(f"--{name.replace('_', '-')}: a scenario file contains it; vary it with --vary {name}=A,B")
    return load_scenario(args.scenario)


def _write_page(points: list[Point], args: argparse.Namespace) -> None:
    from distsim.report.html.page import sweep_page, write_page
    from distsim.scenario.expect.result import entry

    _known(points, args.figure)
    try:
        write_page(sweep_page(args.scenario, [entry(p.result, p.settings) for p in points], args.figure), args.html)
    except OSError as error:
        raise UsageError(f"--html {args.html}: cannot be written ({error.strerror})") from None
    say_written(args.html)


def _known(points: list[Point], figure: str) -> None:
    """Refuse a figure that no point has."""
    known = sorted({name for point in points for name in point.result.figures})
    if figure not in known:
        raise UsageError(f"--figure {figure}: no such figure; there are {', '.join(known)}")


def _table(points: list[Point], price: float | None) -> None:
    """Print one table, or two if one would be wider than the terminal (in a pipe: than COLUMNS)."""
    from distsim.debug.report.console import Console, piped_width

    console = Console(width=None if sys.stdout.isatty() else piped_width(160))
    trains = any("step_s" in point.result.figures or point.result.figures.get("fits") == 0.0 for point in points)
    if trains:
        points = sorted(points, key=lambda point: -tokens_rate(point))
    times, rates = (training_columns(points, price), {}) if trains else (_times(points), _rates(points))
    settings = {name: [str(point.settings[name]) for point in points] for name in points[0].settings}
    whole = as_table(settings, times | rates)
    if console.measure(whole, options=console.options.update(width=10_000)).maximum <= console.width or not rates:
        console.print(whole)
    else:
        console.print(as_table(settings, times))
        console.print(as_table(settings, rates))
    alike = as_good(points) if trains else 0
    if alike:
        console.print(
            f"{alike} of the others cannot be distinguished from the best: the error of their step times is as "
            f"large as the difference"
        )
    for point in points:
        if why := failure(point):
            named = ", ".join(f"{name}={value}" for name, value in point.settings.items())
            console.print(f"{named}: {why}", highlight=False, markup=False)


def as_good(points: list[Point]) -> int:
    """Return how many of *points*, sorted best first, are as fast as the first within the error of a step."""
    best = points[0].result.figures
    if not tokens_rate(points[0]) or "step_high_s" not in best:
        return 0
    least = tokens_rate(points[0]) * best["step_s"] / best["step_high_s"]
    others = [(tokens_rate(point), point.result.figures) for point in points[1:]]
    return sum(
        rate > 0.0 and "step_low_s" in row and rate * row["step_s"] >= least * row["step_low_s"] for rate, row in others
    )


def training_table(points: Sequence[Point], price: float | None = None, in_order: bool = False) -> Table:
    """Return a table of training points, *in_order* or the best first."""
    points = list(points) if in_order else sorted(points, key=lambda point: -tokens_rate(point))
    settings = {name: [str(point.settings[name]) for point in points] for name in points[0].settings}
    return as_table(settings, training_columns(points, price))


def best_table(points: Sequence[Point]) -> Table:
    """Return a table of the best of *points*, which are still running."""
    return training_table(sorted(points, key=lambda point: -tokens_rate(point))[:MOST_LIVE])


def tokens_rate(point: Point) -> float:
    """Return the sort key of training points: tokens per second and GPU, or steps; 0 if no step was completed."""
    figures = point.result.figures
    if not figures.get("fits") or point.result.exit_code or not figures.get("step_s"):
        return 0.0
    return figures.get("tokens_per_s", 1.0 / figures["step_s"]) / max(figures.get("gpus", 1.0), 1.0)


def training_columns(points: list[Point], price: float | None) -> dict[str, list[str]]:
    """Return the columns of training points, which are in their order: the best first."""
    from distsim.text.units import format_bytes, format_time

    def column(name: str, text: Callable[[float], str]) -> list[str]:
        return [text(row[name]) if row.get(name) is not None else "-" for row in figures]

    figures = [point.result.figures for point in points]
    best = points[0] if tokens_rate(points[0]) else None
    columns = {"": ["best" if point is best else "" for point in points]}
    columns["fits"] = [
        "-" if "fits" not in row_figures else "yes" if row_figures["fits"] else "NO" for row_figures in figures
    ]
    columns["step"] = [
        "-"
        if not f.get("step_s")
        else format_time(f["step_s"])
        + (f" ±{(f['step_high_s'] - f['step_low_s']) / 2 / f['step_s']:.0%}" if "step_low_s" in f else "")
        for f in figures
    ]
    columns["tokens/s"] = column("tokens_per_s", "{:,.0f}".format)
    columns["MFU"] = column("mfu", "{:.1%}".format)
    columns["memory"] = [
        f"{format_bytes(f['peak_gpu_memory_bytes'])} {f['gpu_memory_share']:.0%}" if "gpu_memory_share" in f else "-"
        for f in figures
    ]
    columns["exposed"] = column("step_exposed_s", format_time)
    columns["bubble"] = column("step_bubble_s", format_time)
    prices = [f.get("price") if price is None else price for f in figures]
    if any(each is not None for each in prices):
        columns["1B tokens cost"] = [
            f"{each * f['gpus'] * 1e9 / f['tokens_per_s'] / 3600:,.2f}"
            if each is not None and f.get("tokens_per_s")
            else "-"
            for each, f in zip(prices, figures, strict=True)
        ]
    return columns


def failure(point: Point) -> str:
    """Return why the point did not finish, in one line; empty if it did."""
    from distsim.text.units import format_bytes

    result = point.result
    if result.ran and not result.exit_code and not result.limit:
        return ""
    if result.figures.get("fits") == 0.0:
        missing = result.figures["missing_gpu_memory_bytes"]
        if not missing:
            return "out of memory (distsim fits shows the total need)"
        return f"out of memory: {format_bytes(missing)} were missing at that point"
    if not result.ran:
        return "; ".join(result.wrong)
    error = re.findall(r"^\s*((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", result.report, re.MULTILINE)
    printed = [re.sub(r"^ *\[\d+\] ", "", line) for line in result.output.splitlines() if line.strip()]
    lines = [*error, *reversed(printed)]
    return f"{result.verdict}: {lines[0].strip()}" if lines else result.verdict


def as_table(settings: dict[str, list[str]], figures: dict[str, list[str]]) -> Table:
    from rich import box
    from rich.table import Table

    columns = settings | figures
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in columns:
        word = name in ("outcome", "step", "memory", "fits", "")
        whole = word or (name in settings and max(map(len, (name, *columns[name]))) <= WHOLE)
        table.add_column(name, justify="left" if name == "outcome" else "right", overflow="fold", no_wrap=whole)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _times(points: list[Point]) -> dict[str, list[str]]:
    """Return column by column."""
    from distsim.text.units import format_time

    figures = [point.result.figures for point in points]
    columns = {"outcome": [point.result.verdict for point in points]}
    columns["time"] = [format_time(row.get("virtual_time_s", 0.0)) for row in figures]
    if any("virtual_time_high_s" in row for row in figures):
        ends = [
            [format_time(row[n]) for n in ("virtual_time_low_s", "virtual_time_high_s") if n in row] for row in figures
        ]
        columns["8 of 10 times within"] = [" - ".join(pair) or "not measured" for pair in ends]
    for name in ("compute", "exposed", "idle"):
        columns[name] = [format_time(row.get(f"{name}_s", 0.0)) for row in figures]
    columns["busiest link"] = [f"{f['busiest_link']:.0%}" if "busiest_link" in f else "-" for f in figures]
    return columns


def _rates(points: list[Point]) -> dict[str, list[str]]:
    """Return the bus bandwidth of each operation that has one: a barrier has none."""
    from distsim.text.units import format_bandwidth

    figures = [point.result.figures for point in points]
    return {
        f"busbw {name.partition('.')[2]}": [format_bandwidth(f[name]) if f.get(name) else "-" for f in figures]
        for name in sorted({name for row in figures for name in row if name.startswith("busbw") and row[name]})
    }


def _plot(points: list[Point], figure: str) -> dict[str, Any]:
    """Return *figure* over the first variation as a plotly figure, with a line for each combination of the others."""
    from distsim.report.html.draw.plots import label
    from distsim.report.tables import figure_name, figure_unit

    _known(points, figure)
    first, *others = list(points[0].settings)
    lines: dict[str, tuple[list[Any], list[float]]] = {}
    for point in points:
        if figure in point.result.figures:
            name = ", ".join(f"{name}={point.settings[name]}" for name in others)
            xs, ys = lines.setdefault(name, ([], []))
            xs.append(point.settings[first])
            ys.append(point.result.figures[figure])
    scale, unit = figure_unit(figure, max(abs(y) for _, ys in lines.values() for y in ys))
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": [label(x) for x in xs],
            "y": [y * scale for y in ys],
            "name": label(name),
        }
        for name, (xs, ys) in lines.items()
    ]
    title = f"{points[0].result.name}: {figure_name(figure)} by {first}"
    layout = {
        "title": {"text": label(title)},
        "width": 800,
        "height": 500,
        "showlegend": bool(others),
        "xaxis": {"title": {"text": label(first)}, "type": "category"},
        "yaxis": {"title": {"text": f"{figure_name(figure)} ({unit})"}, "rangemode": "tozero"},
    }
    return {"data": traces, "layout": layout}


Show = Callable[[Sequence["Point"]], None]


@contextmanager
def live_points(total: int, table: Callable[[Sequence[Point]], RenderableType] | None) -> Iterator[Show]:
    """Return a function that shows progress; it is called with all finished points after each one.

    Args:
        total: How many there will be at most.
        table: Makes a table of the best points; None: nothing is shown.
    """
    from distsim.report.progress import is_shown

    if table is None:
        yield lambda points: None
        return
    if not is_shown(sys.stderr):
        yield lambda points: print(f"distsim: {_line(points, total)}", file=sys.stderr, flush=True)
        return
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from distsim.debug.report.console import Console

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

        def show(points: Sequence[Point]) -> None:
            live.update(Group(table(points), Text(_line(points, total), style="dim")), refresh=True)

        yield show


def _line(points: Sequence[Point], total: int) -> str:
    from distsim.text.units import format_time

    last = points[-1]
    figures = last.result.figures
    settings = " ".join(f"{name}={value}" for name, value in last.settings.items())
    if figures.get("fits") == 0.0:
        state = "out of memory"
    elif not last.result.ran or last.result.exit_code or not figures.get("step_s"):
        state = last.result.verdict
    else:
        state = f"{format_time(figures['step_s'])} a step"
    return f"{len(points)} of {total} points, {settings}: {state}"
