"""Messages as arrows between the lanes of their ends; those without an other end dangle."""

from __future__ import annotations

from typing import Any

from distsim.report.html.draw.figure import ACCUSED, COMMUNICATION, Figure, figure, label
from distsim.report.html.draw.timeline import LANE_PX, lane_axis
from distsim.report.quantities import time_unit

__all__ = ["arrows"]


def arrows(picture: dict[str, Any]) -> Figure | None:
    """None where there are no messages."""
    lane_of = {rank: number for number, lane in enumerate(picture["lanes"]) for rank in lane["ranks"]}
    met = [m for m in picture["messages"] if m[0] in lane_of and m[2] in lane_of]
    dangling = [d for d in picture["dangling"] if d[0] in lane_of]
    if not met and not dangling:
        return None
    scale, unit = time_unit(picture["end_s"])
    traces = []
    if met:
        ends: list[Any] = [
            (lane_of[s], at * scale, lane_of[r], to * scale, text, f"rank {s} to rank {r}")
            for s, at, r, to, text in met
        ]
        traces.append(_arrows("received", COMMUNICATION, "solid", ends, "arrow", unit))
    if dangling:
        stub = 0.06 * picture["end_s"] * scale
        loose: list[Any] = []
        for rank, peer, op, at, text in dangling:
            here = lane_of[rank]
            there = lane_of.get(peer, here - 1 if here else here + 1)
            # Half of the way: nobody is at the other end.
            middle = here + 0.5 * (there - here if there != here else 0.8)
            loose.append(
                (here, at * scale, middle, at * scale + stub, text, f"{op} of rank {rank} without its other end")
            )
        traces.append(_arrows("no other end", ACCUSED, "dot", loose, "x-thin-open", unit))
    height = 120 + LANE_PX * len(picture["lanes"])
    return figure(traces, height, f"time since the run began ({unit})", **lane_axis(picture))


def _arrows(name: str, colour: str, dash: str, ends: list[Any], head: str, unit: str) -> dict[str, Any]:
    xs: list[float | None] = []
    ys: list[float | None] = []
    texts: list[str | None] = []
    sizes: list[int] = []
    symbols: list[str] = []
    for from_lane, begin, to_lane, end, text, who in ends:
        xs += [begin, end, None]
        ys += [from_lane, to_lane, None]
        texts += [label(f"{who}: {text}")] * 2 + [None]
        sizes += [4, 10, 0]
        symbols += ["circle", head, "circle"]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": xs,
        "y": ys,
        "hovertext": texts,
        "hovertemplate": f"%{{hovertext}}<br>%{{x:.6~g}} {unit}<extra></extra>",
        "line": {"color": colour, "width": 1.5, "dash": dash},
        "marker": {
            "symbol": symbols,
            "size": sizes,
            "color": colour,
            "angleref": "previous",
            "line": {"width": 2, "color": colour},
        },
    }
