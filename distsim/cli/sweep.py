"""`distsim sweep SCENARIO --vary PATH=A,B,C`: one scenario under every combination of some settings."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.errors import UsageError
from distsim.text.output_files import check_writable, say_written

if TYPE_CHECKING:
    from rich.table import Table

    from distsim.scenario.explore.sweep import Point

__all__ = ["add_parser"]

WHOLE = 16
"""Up to this width a column of a setting is not broken."""
DESCRIPTION = """\
Run one scenario under every combination of some settings, and compare.

  distsim sweep step.toml --vary cluster.nodes=1,2,4,8
  distsim sweep step.toml --vary cluster.nodes=2,4 --vary faults[0].factor=1,0.5,0.1 --csv out.csv
  distsim sweep step.toml --vary on=dgx-h100:2,dgx-a100:2 --vary args[1]=1024,4096 -n 2 --plot out.html

PATH is a key of the scenario file, or cluster.nodes. What the file expects is not checked.
"""


def add_parser(subparsers: Any) -> None:
    """Add `sweep`."""
    parser = subparsers.add_parser(
        "sweep",
        help="run one scenario under many settings",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", metavar="SCENARIO", help="a scenario file")
    parser.add_argument("--vary", action="append", required=True, metavar="PATH=A,B", help="may be given several times")
    parser.add_argument("-n", dest="workers", type=int, default=1, metavar="WORKERS", help="processes (default: 1)")
    parser.add_argument("--ray", nargs="?", const="local", metavar="ADDRESS", help="on a Ray cluster (extra: ray)")
    parser.add_argument("--csv", metavar="FILE", help="all figures of all points")
    parser.add_argument("--plot", metavar="FILE", help="a picture (extra: plot)")
    parser.add_argument("--html", metavar="FILE", help="a page with bars and every run (extra: html)")
    parser.add_argument(
        "--figure", default="virtual_time_s", metavar="NAME", help="of the plot and the page (default: virtual_time_s)"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run every point and print the table; 0 unless a setting does not fit."""
    from distsim.report.image import check_image, write_image
    from distsim.scenario import load_scenario
    from distsim.scenario.explore.sweep import parse_variation, sweep, write_csv

    if args.workers < 1:
        raise UsageError(f"-n: expected at least one worker, got {args.workers}")
    check_writable(args.csv, "--csv", "sweep.csv")
    check_image(args.plot)
    if args.html is not None:
        from distsim.report.html import check_page

        check_page(args.html)
    variations = [parse_variation(text) for text in args.vary]
    points = list(
        sweep(load_scenario(args.scenario), variations, args.workers, args.ray, picture=args.html is not None)
    )
    _table(points)
    if args.csv is not None:
        write_csv(points, Path(args.csv))
    if args.plot is not None:
        write_image(_plot(points, args.figure), args.plot)
    if args.html is not None:
        _write_page(points, args)
    return 0


def _write_page(points: list[Point], args: argparse.Namespace) -> None:
    from distsim.report.html.page import write_page
    from distsim.report.html.pages import sweep_page
    from distsim.scenario.expect.entries import entry

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


def _table(points: list[Point]) -> None:
    """One table; two where it is wider than the terminal, or than COLUMNS in a pipe."""
    from distsim.debug.report.console import Console, piped_width

    console = Console(width=None if sys.stdout.isatty() else piped_width(160))
    times, rates = _times(points), _rates(points)
    settings = {name: [str(point.settings[name]) for point in points] for name in points[0].settings}
    whole = _as_table(settings, times | rates)
    if console.measure(whole, options=console.options.update(width=10_000)).maximum <= console.width or not rates:
        console.print(whole)
    else:
        console.print(_as_table(settings, times))
        console.print(_as_table(settings, rates))


def _as_table(settings: dict[str, list[str]], figures: dict[str, list[str]]) -> Table:
    from rich import box
    from rich.table import Table

    columns = settings | figures
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in columns:
        word = name == "outcome"
        whole = word or (name in settings and max(map(len, (name, *columns[name]))) <= WHOLE)
        table.add_column(name, justify="left" if word else "right", overflow="fold", no_wrap=whole)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _times(points: list[Point]) -> dict[str, list[str]]:
    """Column by column."""
    from distsim.text.units import format_time

    figures = [point.result.figures for point in points]
    columns = {"outcome": [point.result.verdict for point in points]}
    columns["time"] = [format_time(found.get("virtual_time_s", 0.0)) for found in figures]
    if any("virtual_time_high_s" in found for found in figures):
        ends = [
            [format_time(found[n]) for n in ("virtual_time_low_s", "virtual_time_high_s") if n in found]
            for found in figures
        ]
        columns["8 of 10 times within"] = [" - ".join(pair) or "not measured" for pair in ends]
    for name in ("compute", "exposed", "idle"):
        columns[name] = [format_time(found.get(f"{name}_s", 0.0)) for found in figures]
    columns["busiest link"] = [f"{f['busiest_link']:.0%}" if "busiest_link" in f else "-" for f in figures]
    return columns


def _rates(points: list[Point]) -> dict[str, list[str]]:
    """The bus bandwidth of each operation that has one: a barrier has none."""
    from distsim.text.units import format_bandwidth

    figures = [point.result.figures for point in points]
    return {
        f"busbw {name.partition('.')[2]}": [format_bandwidth(f[name]) if f.get(name) else "-" for f in figures]
        for name in sorted({name for found in figures for name in found if name.startswith("busbw") and found[name]})
    }


def _plot(points: list[Point], figure: str) -> dict[str, Any]:
    """*figure* over the first variation, a line for each combination of the others; plotly's, as plain data."""
    from distsim.report.html.draw.figure import label
    from distsim.report.quantities import figure_name, figure_unit

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
