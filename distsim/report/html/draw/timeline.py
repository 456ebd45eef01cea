"""Timeline of ranks: each lane shows computation above and communication below; open calls fade out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from distsim.report.html.draw.plots import (
    ACCUSED,
    COMMUNICATION,
    COMPUTE,
    GREY,
    OPEN,
    WAITING,
    Figure,
    band,
    figure,
    label,
)
from distsim.report.tables import time_unit

LANE_PX = 26
CHECKPOINT = "checkpoint"
STEP_NAMES = 1.0
"""Height of the names below the lanes, in lanes."""
MOST_NAMED = 12
"""Largest number of step names in the figure. With more steps, only every second or third has its name."""
FADES = (0.85, 0.6, 0.4, 0.22, 0.1)
"""Opacity of the pieces of an open call's tail."""
TAIL = 0.1
"""Space after the end of the run, as a share of its length."""
KINDS: dict[str, tuple[str, str, str, bool]] = {
    "compute": ("computing", COMPUTE, "", True),
    "communication": ("communicating", COMMUNICATION, "", False),
    "waiting": ("waiting for others", WAITING, "/", False),
    "failed": ("failed", ACCUSED, "x", False),
    "open": ("never ended", OPEN, "/", False),
}
"""For each kind of slice: name, colour, hatching, and whether it is in the upper half of the lane."""


def timeline(picture: dict[str, Any], accused: Collection[int] = ()) -> Figure | None:
    """Draw lanes over time, with lanes of *accused* ranks in bold; None if the records have no times."""
    slices = picture["slices"]
    if not slices:
        return None
    end_s = max(picture["end_s"], *(one[3] for one in slices))  # kernels may end after their rank
    scale, unit = time_unit(end_s)
    traces: list[dict[str, Any]] = []
    for kind, (name, colour, hatching, above) in KINDS.items():
        chosen = [one for one in slices if one[1] == kind]
        if chosen:
            bars = [
                (lane, begin * scale, (end - begin) * scale, text, call) for lane, _, begin, end, text, call in chosen
            ]
            traces.append(_bars(bars, name, colour, hatching, above, unit))
    tail = max(end_s * TAIL, 1e-9) * scale / len(FADES)
    ended = end_s * scale
    opened = [one for one in slices if one[1] == "open"]
    for number, opacity in enumerate(FADES if opened else ()):
        bars = [(lane, ended + number * tail, tail, text, call) for lane, _, _, _, text, call in opened]
        piece = _bars(bars, KINDS["open"][0], OPEN, "", False, unit)
        piece["marker"]["opacity"] = opacity
        traces.append(piece | {"showlegend": False, "legendgroup": KINDS["open"][0]})
    traces.append(_arrivals(slices, scale, unit))
    height = 120 + LANE_PX * len(picture["lanes"])
    shapes, notes = _steps(picture.get("steps") or (), scale, len(picture["lanes"]))
    axes = _lane_axis(picture["lanes"], accused, max(end_s, 1e-9) * scale, TAIL if opened else 0.02)
    if notes:
        axes["yaxis"]["range"][0] += STEP_NAMES
    return figure(
        traces,
        height,
        f"time since the run began ({unit})",
        barmode="overlay",
        shapes=shapes,
        annotations=notes,
        **axes,
    )


def _steps(
    steps: Sequence[Sequence[Any]], scale: float, lanes: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a band for every second training step and for each checkpoint, and their names below the *lanes*."""
    shapes, notes = [], []
    named = 1 + sum(text != CHECKPOINT for *_, text in steps) // MOST_NAMED
    for number, (begin_s, end_s, text) in enumerate(steps):
        is_step = text != CHECKPOINT
        if not is_step or number % 2:
            colour, opacity = (GREY, 0.12) if is_step else (WAITING, 0.35)
            shapes.append(band(begin_s * scale, end_s * scale, colour, opacity) | {"layer": "below"})
        if not is_step or number % named == 0:
            where = {
                "x": (begin_s + end_s) / 2 * scale,
                "y": lanes - (0.1 if is_step else -0.3),
                "xref": "x",
                "yref": "y",
            }
            notes.append(where | {"text": text, "showarrow": False, "font": {"size": 11}})
    return shapes, notes


def _lane_axis(lanes: Sequence[Any], accused: Collection[int], end: float, tail: float) -> dict[str, Any]:
    """Return the axis of lanes, the first on top, and that of time. With many lanes, only some are named."""
    every = 1 + (len(lanes) - 1) // 64
    named = range(0, len(lanes), every)
    axis = {
        "range": [len(lanes) - 0.4, -0.6],
        "tickmode": "array",
        "tickvals": list(named),
        "ticktext": [_named(lanes[number], accused) for number in named],
    }
    return {"yaxis": axis, "xaxis": {"range": [-0.01 * end, (1.0 + tail) * end]}}


def _named(lane: dict[str, Any], accused: Collection[int]) -> str:
    name = label(lane["name"])
    return f"<b>{name}</b>" if any(rank in accused for rank in lane["ranks"]) else name


def _bars(bars: list[Any], name: str, colour: str, hatching: str, above: bool, unit: str) -> dict[str, Any]:
    marker: dict[str, Any] = {"color": colour, "line": {"width": 0}}
    if hatching:
        marker["pattern"] = {"shape": hatching, "size": 5, "solidity": 0.35}
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "legendgroup": name,
        "y": [lane for lane, *_ in bars],
        "base": [_short(begin) for _, begin, *_ in bars],
        "x": [_short(length) for _, _, length, *_ in bars],
        "width": 0.4,
        "offset": -0.42 if above else 0.02,
        "marker": marker,
        "hovertext": [label(text) for *_, text, _ in bars],
        "customdata": [call for *_, call in bars],
        "hovertemplate": f"{name}: %{{hovertext}}<br>from %{{base:.6~g}} {unit}<extra></extra>",
        "textposition": "none",
    }


def _arrivals(slices: list[Any], scale: float, unit: str) -> dict[str, Any]:
    """Return when each call was made, which is when its first slice begins."""
    firsts: dict[int, Any] = {}
    for one in slices:
        if one[5] is not None and (one[5] not in firsts or one[2] < firsts[one[5]][2]):
            firsts[one[5]] = one
    first_arrivals = list(firsts.values())
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "arrival",
        "x": [_short(one[2] * scale) for one in first_arrivals],
        "y": [one[0] + 0.22 for one in first_arrivals],
        "hovertext": [label(one[4]) for one in first_arrivals],
        "customdata": [one[5] for one in first_arrivals],
        "hovertemplate": f"arrives: %{{hovertext}}<br>at %{{x:.6~g}} {unit}<extra></extra>",
        "marker": {"symbol": "line-ns-open", "size": 9, "color": GREY, "line": {"width": 1.5}},
    }


def _short(value: float) -> float:
    return float(f"{value:.9g}")
