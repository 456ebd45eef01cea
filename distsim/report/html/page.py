"""HTML pages as single files: one run, a suite of scenarios, a sweep, a search, or a bench.

The file is the filled template with plotly's script and all data, compressed: plotly.js alone is 4.8 MB, and a hang
of 1,024 ranks names each of them in many lists. Browsers since 2023 unpack it themselves (`DecompressionStream`).
The page's policy forbids all network requests. Text from the program is escaped by the template, or stored as data
and inserted as text.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from distsim import __version__
from distsim.errors import UsageError
from distsim.report.html.draw.plots import PageEntry, bench_plot, cost_plot, efficiency_plot, pareto_plot, sweep_plot
from distsim.report.html.draw.run import Part, RunParts, run_parts
from distsim.report.html.draw.tables import PageTable, TableCell, table
from distsim.report.tables import figure_name, figure_text
from distsim.text.output_files import write_text, written
from distsim.text.units import format_time
from distsim.text.untrusted_input import printable

MOST_RUNS = 60
"""Largest number of runs that a page of several runs shows completely; failed runs come first."""
ROWS_OF_MANY = 200
"""Maximum number of rows of a table in the page of several runs."""


@dataclass(slots=True)
class Page:
    """A page; a page of several runs begins with an overview."""

    title: str
    heading: str
    runs: list[RunParts]
    overview: bool = False
    lines: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    tables: list[PageTable] = field(default_factory=list)
    cards: Sequence[tuple[str, str, str]] = ()
    """Title, headline and remark of each card at the top."""
    sections: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Lists of sentences below the tables, by their titles."""
    document: Mapping[str, Any] | None = None
    """JSON of the overview."""


def write_page(page: Page, path: str, flag: str = "--html") -> None:
    """Write the file, and say so. Raise UsageError if that fails."""
    with written(flag, path):
        write_text(path, html(page))


def html(page: Page) -> str:
    """Return the page as text."""
    template = _template()
    figures = {f"overview-{part.name}": part.figure for part in page.parts if part.figure is not None}
    for run in page.runs:
        figures |= {f"{run.key}-{part.name}": part.figure for part in run.parts if part.figure is not None}
    data = {
        "figures": figures,
        "calls": {run.key: run.calls for run in page.runs},
        "documents": {run.key: run.document for run in page.runs},
        "overview": page.document,
    }
    script, version = _plotly() if figures else ("", "")
    text: str = template.render(
        page=page,
        version=__version__,
        data=packed(json.dumps(data, allow_nan=False, separators=(",", ":"))),
        plotly=script,
        plotly_version=version,
    )
    return text


def packed(text: str) -> str:
    """Return *text* as gzip in base64; equal texts give equal results."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "backslashreplace"), 6, mtime=0)).decode("ascii")


@cache
def _template() -> Any:
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        raise UsageError("jinja2 is not installed; pip install -e '.[html]' in a clone of distsim") from None
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_finalize)
    environment.globals.update(css=Markup(_text("page.css")), js=Markup(_text("page.js")))
    return environment.from_string(_text("page.html.j2"))


def _finalize(value: object) -> object:
    """Remove bidirectional marks and control characters, which a browser would obey."""
    return printable(value) if type(value) is str else value


@cache
def _text(name: str) -> str:
    return files("distsim.report.html").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _plotly() -> tuple[str, str]:
    """Return the compressed script of plotly and the version of plotly.py."""
    from importlib.metadata import version

    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UsageError("plotly is not installed; pip install -e '.[html]' in a clone of distsim") from None
    return packed(get_plotlyjs()), version("plotly")


def run_page(document: Mapping[str, Any]) -> Page:
    """Return the page of one run. Raises ValueError, KeyError, TypeError or AttributeError if *document* is not a
    report."""
    run = run_parts(document)
    subject = f"{run.diagnoses[0].kind}, {run.diagnoses[0].ranks}" if run.diagnoses else run.title
    return Page(f"{run.word}: {subject}", run.title, [run])


def suite_page(entries: Sequence[PageEntry], line: str) -> Page:
    """Return the index page of a suite of scenarios. *line* counts them."""
    runs = _runs(entries)
    columns = ["scenario", "result", "outcome", "virtual time", "wall time"]
    index = PageTable("Scenarios", columns)
    for number, entry in enumerate(entries):
        time_s = entry.figures.get("virtual_time_s")
        index.rows.append(
            [
                TableCell(entry.name, link=_link(number, runs)),
                TableCell("passed" if entry.passed else "FAILED", bad=not entry.passed),
                TableCell(entry.verdict),
                TableCell("-" if time_s is None else format_time(time_s), time_s),
                TableCell(f"{entry.wall_s:.2f} s", entry.wall_s),
            ]
        )
    document = {"schema": "distsim.suite/1", "scenarios": [_of_entry(entry) for entry in entries]}
    lines = [line, *_left_out(entries, runs)]
    tables = [index]
    for entry in entries:
        if entry.orders:
            rows = [[TableCell(one)] for one in entry.orders]
            tables.append(PageTable(f"Orders of {entry.name}", ["explored"], rows))
    return Page("Scenarios", "scenarios", list(runs.values()), True, lines, tables=tables, document=document)


def sweep_page(name: str, entries: Sequence[PageEntry], figure: str) -> Page:
    """Return the page of all points of a sweep."""
    runs = _runs(entries)
    links = [_link(number, runs) for number in range(len(entries))]
    parts = [Part("bars", f"{figure_name(figure)} of each point", "A click on a bar shows its run.")]
    parts[0].figure = sweep_plot(entries, figure, links)
    parts[0].missing = f"No point has the figure {figure}."
    efficiency = efficiency_plot(entries, links)
    if efficiency is not None:
        hint = (
            "Weak scaling: every rank keeps its work, so the time should stay. Strong scaling: all ranks share the "
            "work of the first point. Which one is meant, the program says."
        )
        parts.append(Part("efficiency", "Efficiency against the first point", hint, efficiency))
    index = _points_table(entries, links)
    document = {"schema": "distsim.sweep/1", "scenario": name, "points": [_of_entry(entry) for entry in entries]}
    failed = sum(not entry.passed for entry in entries)
    line = f"{len(entries):,} points of {name}" + (f", {failed:,} of them failed" if failed else "")
    lines = [line, *_left_out(entries, runs)]
    return Page(f"Sweep of {name}", "sweep", list(runs.values()), True, lines, parts, [index], document=document)


def tune_page(name: str, entries: Sequence[PageEntry], lines: Sequence[str]) -> Page:
    """Return the page of a search: *entries*, the best first, and *lines* about the best ones."""
    front = Part("front", "Time and memory", "No other point is better in both than one on the line.")
    front.figure = pareto_plot(entries)
    front.missing = "No point fits."
    links = [""] * len(entries)
    parts = [front, Part("bars", "Step time of each point", figure=sweep_plot(entries, "step_s", links))]
    document = {"schema": "distsim.tune/1", "script": name, "points": [_of_entry(entry) for entry in entries]}
    tables = [_points_table(entries, links)]
    return Page(f"Best layout of {name}", "tune", [], True, list(lines), parts, tables, document=document)


def buy_page(
    title: str,
    cards: Sequence[tuple[str, str, str]],
    points: Sequence[Mapping[str, Any]],
    limits: Mapping[str, float],
    offers: PageTable,
    sections: Mapping[str, Sequence[str]],
    document: Mapping[str, Any],
) -> Page:
    """Return the page of a comparison of machines.

    Args:
        title: What is bought.
        cards: The recommendation and the other choices: title, offer and reason.
        points: Offers, as `cost_plot` takes them.
        limits: The deadline and the budget, likewise.
        offers: The table of offers.
        sections: Lists of sentences below the table, by their titles.
        document: The JSON document (distsim.buy/1).
    """
    hint = "Cost over time: a point for each number of nodes." + " Dotted: the deadline, the budget." * bool(limits)
    chart = Part("cost", "Cost and time", hint, cost_plot(points, limits))
    return Page(title, "buy", [], True, [], [chart], [offers], cards, sections, document)


def _points_table(entries: Sequence[PageEntry], links: Sequence[str]) -> PageTable:
    settings = list(entries[0].settings) if entries else []
    names = list(dict.fromkeys(name for entry in entries for name in entry.figures))
    index = PageTable("Points", ["point", *settings, "outcome", *map(figure_name, names)])
    for number, entry in enumerate(entries):
        row = [TableCell(f"#{number + 1}", float(number), links[number])]
        row += [_setting(entry.settings[name]) for name in settings]
        row.append(TableCell(entry.verdict, bad=not entry.passed))
        row += [TableCell(figure_text(name, entry.figures.get(name)), entry.figures.get(name)) for name in names]
        index.rows.append(row)
    return index


def bench_page(document: Mapping[str, Any]) -> Page:
    """Return the page of a `distsim bench` result."""
    heads = {
        "size_bytes": "size",
        "time_us": "time",
        "low_us": "8 of 10 from",
        "high_us": "to",
        "algbw_GBps": "algbw (GB/s)",
        "busbw_GBps": "busbw (GB/s)",
        "algo": "algorithm",
        "proto": "protocol",
        "channels": "channels",
    }
    parts = [Part("busbw", "Bus bandwidth by size", figure=bench_plot(document["rows"], "busbw_GBps"))]
    parts.append(Part("time", "Time by size", figure=bench_plot(document["rows"], "time_us")))
    title = f"{document['op']} on {document['cluster']}"
    line = f"{document['ranks']:,} ranks, NCCL {document.get('nccl_version', '?')}, simulated"
    sizes = table("Sizes", heads, document["rows"])
    return Page(title, "bench", [], True, [line], parts, [sizes], document=document)


def _setting(value: Any) -> TableCell:
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    return TableCell(str(value), number)


def _runs(entries: Sequence[PageEntry]) -> dict[int, RunParts]:
    """Return the parts of as many runs as a page holds, by index of the entry."""
    whole = [number for number, entry in enumerate(entries) if entry.document]
    whole.sort(key=lambda number: (entries[number].passed, number))
    runs = {}
    for number in sorted(whole[:MOST_RUNS]):
        entry = entries[number]
        run = run_parts(entry.document, f"run-{number + 1}")
        run.title, run.wrong = entry.name, list(entry.wrong)
        for one in run.tables:
            if len(one.rows) > ROWS_OF_MANY:
                one.rest = f"The first {ROWS_OF_MANY:,} of {len(one.rows):,}; the JSON has all."
                one.rows = one.rows[:ROWS_OF_MANY]
        runs[number] = run
    return runs


def _link(number: int, runs: Mapping[int, RunParts]) -> str:
    return runs[number].key if number in runs else ""


def _left_out(entries: Sequence[PageEntry], runs: Mapping[int, RunParts]) -> list[str]:
    lacking = sum(1 for number, entry in enumerate(entries) if entry.document and number not in runs)
    return [f"{lacking:,} more runs are in the table only: a page holds {MOST_RUNS}, those that failed first."] * (
        lacking > 0
    )


def _of_entry(entry: PageEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "passed": entry.passed,
        "verdict": entry.verdict,
        "wrong": list(entry.wrong),
        "settings": dict(entry.settings),
        "figures": dict(entry.figures),
    }
