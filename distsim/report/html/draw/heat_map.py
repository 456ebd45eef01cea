"""Links by time: how much of its bandwidth each of the busiest had in use; planted faults as bands."""

from __future__ import annotations

from typing import Any

from distsim.report.html.draw.figure import ACCUSED, Figure, figure, label
from distsim.report.quantities import time_unit

__all__ = ["heat_map"]

ROW_PX = 18
TOPS = (1, 2, 5, 10, 25, 50, 100, 1e9)
"""Where the scale of colours may end, in percent."""


def heat_map(picture: dict[str, Any]) -> Figure | None:
    """None where nobody took samples."""
    links = picture["links"]
    if not links:
        return None
    scale, unit = time_unit(picture["end_s"])
    end = max(picture["end_s"], links["times_s"][-1]) * scale
    edges = [time_s * scale for time_s in links["times_s"]]
    if edges[-1] < end:
        edges.append(end)
    cells = len(edges) - 1 or 1
    if len(edges) == 1:
        edges.append(end + 1e-9)
    peak = max(max(row) for row in links["rows"])
    trace = {
        "type": "heatmap",
        "x": edges,
        "y": [label(name) for name in links["names"]],
        "z": [[100 * value for value in row[:cells]] for row in links["rows"]],
        "zmin": 0,
        "zmax": next(top for top in TOPS if top >= 100 * peak),
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": "% in use", "side": "right"}, "thickness": 12},
        "hovertemplate": f"%{{y}}<br>from %{{x:.6~g}} {unit}: %{{z:.3~g}} % in use<extra></extra>",
    }
    shapes, notes = [], []
    for number, (begin, until, text) in enumerate(picture["faults"][:20]):
        to = end if until is None else min(until * scale, end)
        shapes.append(
            {
                "type": "rect",
                "xref": "x",
                "yref": "paper",
                "x0": begin * scale,
                "x1": to,
                "y0": 0,
                "y1": 1,
                "fillcolor": ACCUSED,
                "opacity": 0.25,
                "line": {"width": 1, "color": ACCUSED},
            }
        )
        where = {"x": begin * scale, "y": 1, "xref": "x", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        notes.append({**where, "text": label(text), "showarrow": False, "yshift": 14 * (number % 3)})
    top = 30 + 14 * min(3, len(notes))
    return figure(
        [trace],
        max(190, 90 + top + ROW_PX * len(links["names"])),
        f"time since the run began ({unit})",
        yaxis={"autorange": "reversed"},
        shapes=shapes,
        annotations=notes,
        margin={"l": 8, "r": 16, "t": top, "b": 44},
    )
