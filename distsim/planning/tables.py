"""Shows points of a sweep or a search: figures of training steps, as tables that grow."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from distsim.cluster.files.load import kind_of
from distsim.collectives.uncertainty import memory_error, ratio_error
from distsim.debug.report.console import Console, piped_width
from distsim.errors import Failure, RankFailure
from distsim.planning.search import tokens_rate
from distsim.planning.variations import NODES, Point
from distsim.report.progress import is_shown
from distsim.scenario.pool import PointPool
from distsim.text.tracebacks import but_for_numbers
from distsim.text.units import format_bandwidth, format_bytes, format_time, plural

MOST_LIVE = 12
"""Rows of the table that a terminal shows while points run."""
IN_SECOND: tuple[str, ...] = ("fits", "MFU", "memory", "exposed", "bubble")
"""Columns of training points that are in a second table where one is too wide."""
ALIKE = "cannot be distinguished from the best: the error of their step times is as large as the difference"
WHOLE = 16
"""Width up to which a column of a setting is not wrapped."""


def named(point: Point) -> str:
    """Return the settings of a point as text."""
    return " ".join(f"{name}={value}" for name, value in point.settings.items())


def points_console() -> Console:
    """Return the console on which points are printed: as wide as the terminal, in a pipe as COLUMNS."""
    return Console(width=None if sys.stdout.isatty() else piped_width(160))


def print_points(points: list[Point]) -> None:
    """Print one table, or two if one would be wider than the terminal (in a pipe: than COLUMNS)."""
    console = points_console()
    trains = any("step_s" in point.result.figures or point.result.figures.get("fits") == 0.0 for point in points)
    if trains:
        points = sorted(points, key=lambda point: -tokens_rate(point.result))
    columns, later = _training_columns(points), IN_SECOND
    if not trains:
        rates = _rates(points)
        columns, later = _times(points) | rates, tuple(rates)
    settings = {name: [str(point.settings[name]) for point in points] for name in points[0].settings}
    print_columns(console, settings, columns, later)
    if trains and (note := _best_note(points)):
        console.print(note)
    if trains and (alike := as_good(points)):
        console.print(f"{alike} of the others {ALIKE}")
    print_failures(console, [point for point in points if failure(point)], failure)


def print_failures(console: Console, points: Sequence[Point], reason: Callable[[Point], str]) -> None:
    """Print a line with the *reason* of each point that failed, then what their programs raised."""
    for point in points:
        below = " (traceback below)" if _raised(point) else ""
        console.print(f"{named(point)}: {reason(point)}{below}")
    print_tracebacks(console, points)


def print_tracebacks(console: Console, points: Iterable[Point]) -> None:
    """Print what the programs of points raised, whole. Tracebacks that differ only in numbers are shown once."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for point in points:
        if raised := _raised(point):
            text = str(RankFailure(raised))
            alike.setdefault(but_for_numbers(text), []).append((named(point), text))
    for (first, text), *others in alike.values():
        names = "; ".join([first, *(name for name, _ in others)])
        differ = f", the same but for numbers; of {first}" if any(other != text for _, other in others) else ""
        console.print(f"\n{names}{differ}, {text}", no_wrap=True, overflow="ignore", crop=False)


def _raised(point: Point) -> list[Failure]:
    """Return the exceptions of a point's program, the culprits' first; none where a GPU was full."""
    result = point.result
    failures = () if result.figures.get("fits") == 0.0 else result.document.get("failures") or ()
    return sorted((Failure(**one) for one in failures), key=lambda one: set(result.culprits).isdisjoint(one.ranks))


def print_columns(
    console: Console, names: dict[str, list[str]], columns: dict[str, list[str]], later: Collection[str]
) -> None:
    """Print one table, or two if it would be wider than the console.

    Args:
        console: Where to.
        names: Columns that each table begins with, by title.
        columns: The other columns, likewise.
        later: Titles of those in the second table.
    """
    whole = _as_table(names, columns)
    parts = [
        {title: cells for title, cells in columns.items() if (title in later) is second} for second in (False, True)
    ]
    if not all(parts) or console.measure(whole, options=console.options.update(width=10_000)).maximum <= console.width:
        console.print(whole)
        return
    for part in parts:
        console.print(_as_table(names, part))


def as_good(points: list[Point]) -> int:
    """Return how many of *points*, sorted best first, are as fast as the first within the error of a step.

    On one kind of node it is the error of a ratio: program, method and card are common to both.
    """
    best = points[0]
    if not tokens_rate(best.result) or "step_high_s" not in best.result.figures:
        return 0
    rates = [tokens_rate(point.result) for point in points]
    return sum(
        rate > 0.0 and may_be_as_good(best, other, rates[0] / rate)
        for other, rate in zip(points[1:], rates[1:], strict=True)
    )


def may_be_as_good(best: Point, other: Point, ratio: float) -> bool:
    """Return whether *other* may be as good as *best*, given the error of simulated steps.

    Args:
        best: The better point.
        other: Another one.
        ratio: The figure of *other* by that of *best*, at least 1, both in proportion to the time of a step.
    """
    if kind_of(str(best.settings.get("on", ""))) == kind_of(str(other.settings.get("on", ""))):
        return ratio <= ratio_error()
    figures, low = best.result.figures, other.result.figures
    return (
        "step_low_s" in low
        and "step_high_s" in figures
        and ratio * low["step_low_s"] / low["step_s"] <= figures["step_high_s"] / figures["step_s"]
    )


def tight_text(figures: Mapping[str, float]) -> str:
    """Return the sentence that says that the memory may not be enough; empty if it is by more than the usual error."""
    share, worst = figures.get("gpu_memory_share", 0.0), memory_error().worst
    if share <= 1.0 - worst:
        return ""
    return f"its peak, {share:.0%} of the memory, is within the error of predicted peaks ({worst:.1%} at most)"


def training_table(points: Sequence[Point], in_order: bool = False) -> Table:
    """Return a table of training points, *in_order* or the best first."""
    points = list(points) if in_order else sorted(points, key=lambda point: -tokens_rate(point.result))
    settings = {name: [str(point.settings[name]) for point in points] for name in points[0].settings}
    return _as_table(settings, _training_columns(points))


def token_cost(point: Point) -> float | None:
    """Return the price of a billion tokens; None if the price or the rate is unknown."""
    figures = point.result.figures
    if figures.get("price") is None or not figures.get("tokens_per_s") or not tokens_rate(point.result):
        return None
    return figures["price"] * figures["gpus"] * 1e9 / figures["tokens_per_s"] / 3600


def _cheapest(points: Sequence[Point]) -> Point | None:
    """Return the point with the cheapest tokens, if prices differ."""
    costs = {number: cost for number, point in enumerate(points) if (cost := token_cost(point)) is not None}
    if len({point.result.figures.get("price") for point in points}) < 2 or not costs:
        return None
    return points[min(costs, key=lambda number: costs[number])]


def _best_note(points: Sequence[Point]) -> str:
    """Return what the marks of a table mean; empty without a best point."""
    if not tokens_rate(points[0].result):
        return ""
    unit = "tokens/s" if "tokens_per_s" in points[0].result.figures else "steps/s"
    note = f"best: most {unit} per GPU"
    return f"{note}; cheapest: least cost of a token" if _cheapest(points) is not None else note


def _training_columns(points: list[Point]) -> dict[str, list[str]]:
    """Return the columns of training points, which are in their order: the best first."""

    def column(name: str, text: Callable[[float], str]) -> list[str]:
        return [text(row[name]) if row.get(name) is not None else "-" for row in figures]

    figures = [point.result.figures for point in points]
    best = points[0] if tokens_rate(points[0].result) else None
    cheapest = _cheapest(points)
    marks = [[mark for mark, one in (("best", best), ("cheapest", cheapest)) if one is point] for point in points]
    columns = {"": [" ".join(mark) for mark in marks]}
    clusters_vary = any(name == "on" or name in NODES for name in points[0].settings)
    if clusters_vary:
        columns["GPUs"] = column("gpus", "{:,.0f}".format)
    columns["fits"] = [
        "-" if "fits" not in row_figures else "yes" if row_figures["fits"] else "NO" for row_figures in figures
    ]
    columns["step"] = [step_text(row) if row.get("step_s") else "-" for row in figures]
    columns["tokens/s"] = column("tokens_per_s", "{:,.0f}".format)
    if clusters_vary:
        columns["per GPU"] = [
            f"{tokens_rate(point.result):,.0f}" if "tokens_per_s" in point.result.figures else "-" for point in points
        ]
    columns["MFU"] = column("mfu", "{:.1%}".format)
    columns["memory"] = [
        f"{format_bytes(f['peak_gpu_memory_bytes'])} {f['gpu_memory_share']:.0%}" if "gpu_memory_share" in f else "-"
        for f in figures
    ]
    columns["exposed"] = column("step_exposed_s", format_time)
    columns["bubble"] = column("step_bubble_s", format_time)
    costs = [token_cost(point) for point in points]
    if any(cost is not None for cost in costs):
        columns["1B tokens cost"] = ["-" if cost is None else f"{cost:,.2f}" for cost in costs]
    return columns


def step_text(figures: Mapping[str, float]) -> str:
    """Return the time of a step, and half of its interval as a share, where there is one."""
    text = format_time(figures["step_s"])
    if "step_low_s" not in figures:
        return text
    return f"{text} ±{(figures['step_high_s'] - figures['step_low_s']) / 2 / figures['step_s']:.0%}"


def failure(point: Point) -> str:
    """Return why the point did not finish, in one line; empty if it did."""
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
    error = [f"{one.type}: {one.message}".splitlines()[0] for one in _raised(point)]
    printed = [re.sub(r"^ *\[\d+\] ", "", line) for line in result.output.splitlines() if line.strip()]
    lines = [*error, *reversed(printed)]
    return f"{result.verdict}: {lines[0].strip()}" if lines else result.verdict


def _as_table(settings: dict[str, list[str]], figures: dict[str, list[str]]) -> Table:
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
    figures = [point.result.figures for point in points]
    return {
        f"busbw {name.partition('.')[2]}": [format_bandwidth(f[name]) if f.get(name) else "-" for f in figures]
        for name in sorted({name for row in figures for name in row if name.startswith("busbw") and row[name]})
    }


Show = Callable[[Sequence[Point]], None]


@contextmanager
def live_points(total: int | None, pool: PointPool | None, is_kept: bool = True) -> Iterator[Show]:
    """Return a function that shows progress; it is called with all finished points after each one.

    Args:
        total: How many there will be at most; None: not known.
        pool: Where they run, if not here.
        is_kept: Whether points are kept, as those of scripts are, which take long; else nothing is shown.
    """
    if not is_kept:
        yield lambda points: None
        return
    if not is_shown(sys.stderr):
        yield lambda points: print(f"distsim: {_line(points, total, pool)}", file=sys.stderr, flush=True)
        return
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

        def show(points: Sequence[Point]) -> None:
            best = sorted(points, key=lambda point: -tokens_rate(point.result))[:MOST_LIVE]
            live.update(Group(training_table(best), Text(_line(points, total, pool), style="dim")), refresh=True)

        yield show


def _line(points: Sequence[Point], total: int | None, pool: PointPool | None) -> str:
    last = points[-1]
    figures = last.result.figures
    if figures.get("fits") == 0.0:
        state = "out of memory"
    elif not last.result.ran or last.result.exit_code or not figures.get("step_s"):
        state = last.result.verdict
    else:
        state = f"{format_time(figures['step_s'])} a step"
    if total is None:
        return f"{plural(len(points), 'point')}, {named(last)}: {state}"
    more = "" if pool is None else pool.state(total - len(points) - pool.running)
    return f"{len(points)} of {total} points, {named(last)}: {state}" + (f" ({more})" if more else "")
