"""`distsim sweep SCENARIO --vary PATH=A,B,C`: one scenario under every combination of some settings."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.errors import UsageError
from distsim.planning.command import AFTER_SCRIPT as AFTER_SCRIPT
from distsim.planning.command import Space, add_point_flags, space_of
from distsim.planning.command import rewritten as rewritten
from distsim.text.output_files import image_file, write_json

if TYPE_CHECKING:
    from distsim.planning.variations import Point

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
        description=DESCRIPTION,
        usage="distsim sweep [flags] --vary PATH=A,B [--vary ...] SCENARIO | SCRIPT [script's own arguments]",
    )
    parser.add_argument("scenario", metavar="SCENARIO|SCRIPT", help="a scenario file (.toml), or a script (.py)")
    add_point_flags(parser, "PATH=A,B", "a page with bars and every run")
    parser.add_argument("--plot", metavar="FILE", type=image_file, help="a picture (extra: plot)")
    parser.add_argument(
        "--figure",
        default="virtual_time_s",
        metavar="NAME",
        help="figure of the plot and the page (default: virtual_time_s)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run every point and print the table; 0 unless a setting does not fit."""
    from distsim.planning.tables import failure, print_points
    from distsim.planning.variations import sweep_json, write_csv

    space = space_of(args, "PATH=A,B")
    points = _points(space, args)
    print_points(points)
    if args.csv is not None:
        write_csv(points, Path(args.csv))
    write_json("--json", args.json, sweep_json(points, args.scenario), sort_keys=True)
    if args.plot is not None:
        from distsim.report.image import write_image

        write_image(_plot(points, args.figure), args.plot)
    if args.html is not None:
        from distsim.report.html.page import sweep_page, write_page
        from distsim.scenario.expect.result import entry

        _known(points, args.figure)
        write_page(sweep_page(args.scenario, [entry(p.result, p.settings) for p in points], args.figure), args.html)
    if args.scenario.endswith(".py") and all(failure(point) for point in points):
        raise UsageError(f"no point is valid (the first one: {failure(points[0])}); vary other values")
    return 0


def _points(space: Space, args: argparse.Namespace) -> list[Point]:
    """Run all points; for a script, print a line whenever one has ended."""
    from distsim.planning.tables import live_points, print_points
    from distsim.planning.variations import sweep
    from distsim.scenario.pool import opened

    picture = args.html is not None
    kept = space.kept() if args.scenario.endswith(".py") else None
    points: list[Point] = []
    try:
        with opened(space.pool), live_points(space.size, space.pool, kept is not None) as show:
            for point in sweep(space.scenario, space.variations, space.pool, picture, kept):
                point.result = space.priced(point.settings, point.result)
                points.append(point)
                show(points)
    except KeyboardInterrupt:
        if points:
            print_points(points)
            folder = "" if kept is None else kept.continues
            print(f"distsim: interrupted after {len(points)} of {space.size} points{folder}", file=sys.stderr)
        raise
    return sorted(points, key=lambda point: point.number)


def _known(points: list[Point], figure: str) -> None:
    """Refuse a figure that no point has."""
    known = sorted({name for point in points for name in point.result.figures})
    if figure not in known:
        raise UsageError(f"--figure {figure}: no such figure; there are {', '.join(known)}")


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
