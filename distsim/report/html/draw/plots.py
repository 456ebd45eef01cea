"""plotly figures as plain data: common parts, bars and efficiency of a sweep, and curves of a bench."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsim.report.tables import figure_name, figure_unit, time_unit

Figure = dict[str, Any]

COMPUTE, COMMUNICATION, WAITING, OPEN, ACCUSED = "#4f86c6", "#2a9d6f", "#d9a13b", "#c8467a", "#d1495b"
"""Colours that people with colour vision deficiency can distinguish, on white and on black; waiting is also hatched."""
GREY = "#8a8f98"

LONGEST = 200
"""Largest number of characters of a text in a figure."""
RANKS = ("cluster.nodes", "on.nodes", "nnodes", "nproc_per_node")
"""Settings to which the number of ranks is proportional."""
BAR_PX = 26


@dataclass(slots=True)
class PageEntry:
    """One of several runs: its report, and its line in the overview."""

    name: str
    passed: bool
    verdict: str
    wrong: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    wall_s: float = 0.0
    document: Mapping[str, Any] = field(default_factory=dict)
    orders: Sequence[str] = ()
    """What an exploration has found, and who came last at which line."""


def band(begin: float, end: float, colour: str, opacity: float) -> dict[str, Any]:
    """Return a band over the whole height of a figure."""
    where = {"type": "rect", "xref": "x", "yref": "paper", "x0": begin, "x1": end, "y0": 0, "y1": 1}
    return where | {"fillcolor": colour, "opacity": opacity, "line": {"width": 0}}


def label(text: object) -> str:
    """Return a text of the program in a form that plotly does not interpret as markup."""
    plain = str(text)
    return html.escape(plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 3]}...", quote=False)


def figure(data: list[dict[str, Any]], height: int, x_title: str, **layout: Any) -> Figure:
    """Return traces with a layout. The page sets the colours of text and background for its light and dark mode."""
    common: dict[str, Any] = {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 8, "b": 44},
        "xaxis": {"title": {"text": x_title}, "zeroline": False, "automargin": True},
        "yaxis": {"automargin": True, "zeroline": False},
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
        "dragmode": "pan",
    }
    for name, value in layout.items():
        both = isinstance(value, dict) and isinstance(common.get(name), dict)
        common[name] = {**common[name], **value} if both else value
    return {"data": data, "layout": common}


def sweep_plot(points: Sequence[PageEntry], name: str, links: Sequence[str]) -> Figure | None:
    """Return one bar per point; failed points are red and labelled."""
    there = [(point, link) for point, link in zip(points, links, strict=True) if name in point.figures]
    if not there:
        return None
    scale, unit = figure_unit(name, max(abs(point.figures[name]) for point, _ in there))
    traces = []
    for passed, colour in ((True, COMPUTE), (False, ACCUSED)):
        chosen = [(point, link) for point, link in there if point.passed is passed]
        if not chosen:
            continue
        trace = _bars("ran" if passed else "failed", colour, [point for point, _ in chosen])
        trace["x"] = [point.figures[name] * scale for point, _ in chosen]
        trace["customdata"] = [link or None for _, link in chosen]
        trace["text"] = [
            label(f"{point.figures[name] * scale:.4g}{'' if passed else f'  {point.verdict}'}") for point, _ in chosen
        ]
        if not passed:
            trace["marker"]["pattern"] = {"shape": "x", "size": 5}
        traces.append(trace)
    return _sideways(traces, [point for point, _ in there], f"{figure_name(name)} ({unit})")


def efficiency_plot(points: Sequence[PageEntry], links: Sequence[str]) -> Figure | None:
    """Plot the efficiency; None if no number of ranks varies or the first point has no time."""
    varied = [name for name in RANKS if points and name in points[0].settings]
    times = [point.figures.get("virtual_time_s", 0.0) if point.passed else 0.0 for point in points]
    if not varied or not times or not times[0]:
        return None
    try:
        sizes = [math.prod(float(point.settings[name]) for name in varied) for point in points]
    except (TypeError, ValueError):
        return None
    if not sizes[0]:
        return None
    traces = []
    for name, colour in (("weak scaling", COMPUTE), ("strong scaling", COMMUNICATION)):
        trace = _bars(name, colour, points)
        parts = [
            None if not time_s else 100 * times[0] / time_s * (1.0 if name == "weak scaling" else sizes[0] / size)
            for time_s, size in zip(times, sizes, strict=True)
        ]
        trace["x"] = parts
        trace["text"] = ["" if part is None else f"{part:.3g} %" for part in parts]
        trace["customdata"] = [link or None for link in links]
        traces.append(trace)
    return _sideways(traces, points, "efficiency (%)", barmode="group")


def pareto_plot(points: Sequence[PageEntry]) -> Figure | None:
    """Plot time over peak memory of the points that fit. A line joins the points that no other beats in both.

    The time is that of a step if all points have the same number of tokens, else GPU time for a million tokens.
    """
    there = [point for point in points if point.passed and point.figures.get("fits") and point.figures.get("step_s")]
    if not there:
        return None
    tokens = {point.figures.get("tokens_per_step") for point in there}
    is_step = len(tokens) == 1 or None in tokens
    times = [
        point.figures["step_s"]
        if is_step
        else 1e6 * point.figures["gpus"] / (point.figures["tokens_per_step"] / point.figures["step_s"])
        for point in there
    ]
    memory = [point.figures["peak_gpu_memory_bytes"] / 2**30 for point in there]
    order = sorted(range(len(there)), key=lambda i: (memory[i], times[i]))
    front: list[int] = []
    for i in order:
        if not front or times[i] < times[front[-1]]:
            front.append(i)
    scale, unit = time_unit(max(times))
    traces: list[dict[str, Any]] = []
    for name, mode, places in (
        ("beaten by another", "markers", [i for i in order if i not in front]),
        ("front", "lines+markers", front),
    ):
        traces.append(
            {
                "type": "scatter",
                "mode": mode,
                "name": name,
                "x": [memory[i] for i in places],
                "y": [times[i] * scale for i in places],
                "hovertext": [_name(there[i]) for i in places],
                "hovertemplate": f"%{{hovertext}}<br>%{{x:.4~g}} GiB, %{{y:.4~g}} {unit}<extra></extra>",
                "marker": {"size": 9, "color": COMPUTE if name == "front" else COMMUNICATION},
                "line": {"color": COMPUTE},
            }
        )
    title = "step time" if is_step else "time of one GPU for a million tokens"
    return figure(
        traces,
        420,
        "peak memory of a GPU (GiB)",
        xaxis={"rangemode": "tozero"},
        yaxis={"title": {"text": f"{title} ({unit})"}, "rangemode": "tozero"},
    )


def cost_plot(points: Sequence[Mapping[str, Any]], limits: Mapping[str, float]) -> Figure:
    """Plot the cost of offers over their time, with a line for each kind of machine.

    Args:
        points: Offers with `kind`, `name`, `days`, `cost` and `mark` (empty for most).
        limits: The largest `seconds` and `amount`, where there are any; they are drawn as lines.
    """
    traces: list[dict[str, Any]] = []
    colours = (COMPUTE, COMMUNICATION, WAITING, OPEN, GREY)
    for number, kind in enumerate(dict.fromkeys(point["kind"] for point in points)):
        there = sorted((point for point in points if point["kind"] == kind), key=lambda point: point["days"])
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers+text",
                "name": label(kind),
                "x": [point["days"] for point in there],
                "y": [point["cost"] for point in there],
                "text": [label(point["mark"]) for point in there],
                "textposition": "top center",
                "cliponaxis": False,
                "hovertext": [label(point["name"]) for point in there],
                "hovertemplate": "%{hovertext}<br>%{x:.3~g} days, %{y:.3~s}<extra></extra>",
                "marker": {"size": [14 if point["mark"] else 8 for point in there], "symbol": number},
                "line": {"color": colours[number % len(colours)]},
            }
        )
    line = {"type": "line", "line": {"dash": "dot", "color": GREY}}
    shapes = []
    if "seconds" in limits:
        days = limits["seconds"] / 86400.0
        shapes.append(line | {"x0": days, "x1": days, "yref": "paper", "y0": 0, "y1": 1})
    if "amount" in limits:
        shapes.append(line | {"y0": limits["amount"], "y1": limits["amount"], "xref": "paper", "x0": 0, "x1": 1})
    return figure(
        traces,
        320,
        "days",
        xaxis={"rangemode": "tozero"},
        yaxis={"title": {"text": "cost"}, "rangemode": "tozero", "tickformat": ".3~s"},
        shapes=shapes,
    )


def bench_plot(rows: Sequence[Mapping[str, Any]], name: str) -> Figure:
    """Plot one figure over the message size."""
    there = [row for row in rows if row.get(name) is not None]
    busbw = name == "busbw_GBps"
    top = max((float(row[name]) for row in there), default=1.0)
    scale, unit = (1.0, "GB/s") if busbw else time_unit(top * 1e-6)
    scale = scale if busbw else scale * 1e-6
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "busbw" if busbw else "time",
        "x": [row["size_bytes"] for row in there],
        "y": [float(row[name]) * scale for row in there],
        "hovertext": [label(f"{row.get('algo', '')} {row.get('proto', '')}".strip()) for row in there],
        "hovertemplate": f"%{{x:,}} bytes: %{{y:.4~g}} {unit}<br>%{{hovertext}}<extra></extra>",
        "line": {"color": COMPUTE},
    }
    title = f"{'bus bandwidth' if busbw else 'time'} ({unit})"
    several = len({row["size_bytes"] for row in there}) > 1
    axis = {"type": "log" if several and all(row["size_bytes"] for row in there) else "linear"}
    return figure([trace], 380, "size (bytes)", xaxis=axis, yaxis={"title": {"text": title}, "rangemode": "tozero"})


def _bars(name: str, colour: str, points: Sequence[PageEntry]) -> dict[str, Any]:
    names = [_name(point) for point in points]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": names,
        "marker": {"color": colour},
        "textposition": "outside",
        "cliponaxis": False,
        "hovertext": [label(f"{text}: {point.verdict}") for text, point in zip(names, points, strict=True)],
        "hovertemplate": "%{hovertext}<br>%{x:.5~g}<extra></extra>",
    }


def _sideways(traces: list[dict[str, Any]], points: Sequence[PageEntry], title: str, **layout: Any) -> Figure:
    names = list(dict.fromkeys(_name(point) for point in points))
    return figure(
        traces,
        110 + BAR_PX * len(names) * (len(traces) if layout else 1),
        title,
        yaxis={"autorange": "reversed", "type": "category", "categoryorder": "array", "categoryarray": names},
        xaxis={"range": [0, 1.18 * max((x for trace in traces for x in trace["x"] if x is not None), default=1.0)]},
        **(layout or {"barmode": "overlay"}),
    )


def _name(point: PageEntry) -> str:
    return label(", ".join(f"{name}={value}" for name, value in point.settings.items()))
