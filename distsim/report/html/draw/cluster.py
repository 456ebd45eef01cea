"""Draws the used part of the cluster, and the use of its links over time.

The colour of an edge is the average share of its bandwidth that was used. Many equal vertices (`n0/gpu0`, `n1/gpu0`,
...) are drawn as one with their number; its edges show the busiest of them. A heat map shows the used bandwidth of the
busiest links over time, with injected faults as bands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distsim.report.html.draw.drawing import Box, Drawing, arrow
from distsim.report.html.draw.plots import ACCUSED, Figure, figure, label
from distsim.report.quantities import time_unit
from distsim.text.units import format_bandwidth

__all__ = ["cluster", "heat_map"]

LAYERS = ("gpu", "cpu", "nvswitch", "pcie", "nic", "leaf", "switch", "spine")
"""Layers of the drawing, from bottom to top."""
MOST_HOSTS, MOST_ALIKE = 2, 8
STEPS = ((0.9, "#b2182b"), (0.6, "#e08214"), (0.3, "#d9b13b"), (0.1, "#5aae61"), (0.0, "#7f8c9a"))
"""Colours with the share of bandwidth from which they are used."""
_NAME = re.compile(r"(?:n(\d+)/)?([A-Za-z_]+\d*/)?([A-Za-z_]+)(\d*)")
"""`n0/gpu3`, `leaf2`, `group1/switch5`: host, the fabric's own groups, kind, number."""
ROW_PX = 18
TOPS = (1, 2, 5, 10, 25, 50, 100, 1e9)
"""Possible upper ends of the colour scale, in percent."""


@dataclass(slots=True)
class Edge:
    """Both directions of a pair, and of all pairs drawn as it."""

    count: int = 0
    mean: float = 0.0
    peak: float = 0.0
    bandwidth: float = 0.0


def cluster(links: Sequence[Mapping[str, Any]]) -> Drawing | None:
    """Draw the cluster; None if no link carried traffic or the link names are unknown."""
    ends = [tuple(str(link["name"]).split("->", 1)) for link in links]
    names = {name for pair in ends if len(pair) == 2 for name in pair}
    drawn_as = _folded(names)
    if not drawn_as:
        return None
    edges: dict[tuple[str, str], Edge] = {}
    for link, pair in zip(links, ends, strict=True):
        if len(pair) != 2 or not all(name in drawn_as for name in pair):
            continue
        one, other = sorted(drawn_as[name] for name in pair)
        if one == other:
            continue
        edge = edges.setdefault((one, other), Edge())
        edge.count += 1
        edge.mean = max(edge.mean, float(link["mean_utilisation"] or 0.0))
        edge.peak = max(edge.peak, float(link["peak_utilisation"] or 0.0))
        edge.bandwidth = float(link["bandwidth_bytes_per_s"] or 0.0)
    counts: dict[str, int] = {}
    for name in drawn_as.values():
        counts[name] = counts.get(name, 0) + 1
    boxes = _placed(counts)
    if not edges:
        return None
    layers = {_kind(name) for name in boxes}
    drawing = Drawing(0.0, 0.0, boxes=list(boxes.values()))
    for (one, other), edge in edges.items():
        line = arrow(boxes[one], boxes[other], bend=0.0)
        line.width = 1.5 + 3.5 * edge.mean
        line.colour = next(colour for share, colour in STEPS if edge.mean >= share)
        rate = format_bandwidth(edge.bandwidth) if edge.bandwidth else "unlimited"
        line.title = f"{one} - {other}: {rate}, {edge.mean:.1%} in use on average, {edge.peak:.0%} at its peak"
        if edge.count > 2:
            line.title += f" (the busiest of {edge.count:,} links)"
        drawing.arrows.append(line)
    drawing.fit()
    drawing.words = f"{len(names):,} parts in {len(layers)} layers, {len(links):,} links that carried bytes"
    return drawing


def _kind(name: str) -> str:
    match = _NAME.match(name.replace("*", "0"))
    return match[3] if match is not None else ""


def _folded(names: set[str]) -> dict[str, str]:
    """Map each name to its representative in the drawing: itself, or all hosts or parts of its kind."""
    parts = {name: match for name in sorted(names) if (match := _NAME.fullmatch(name)) is not None}
    hosts = {match[1] for match in parts.values() if match[1] is not None}
    all_hosts = len(hosts) > MOST_HOSTS
    of_kind: dict[tuple[str | None, str, str], int] = {}
    for match in parts.values():
        key = (match[1], _any_number(match[2]), match[3])
        of_kind[key] = of_kind.get(key, 0) + 1
    drawn = {}
    for name, match in parts.items():
        host, group, kind, number = match.groups()
        if of_kind[host, _any_number(group), kind] > MOST_ALIKE * (1 if host is None else 2):
            group, number = _any_number(group), "*"
        prefix = "" if host is None else "n*/" if all_hosts else f"n{host}/"
        drawn[name] = f"{prefix}{group or ''}{kind}{number}"
    return drawn


def _any_number(group: str | None) -> str:
    return re.sub(r"\d+", "*", group or "")


def _placed(counts: Mapping[str, int]) -> dict[str, Box]:
    """Layers on top of each other, hosts side by side."""
    layers: dict[str, list[str]] = {}
    for name in sorted(counts, key=_natural):
        layers.setdefault(_kind(name), []).append(name)
    order = sorted(layers, key=lambda kind: -LAYERS.index(kind) if kind in LAYERS else 1)
    boxes: dict[str, Box] = {}
    widths = []
    for down, kind in enumerate(order):
        row = []
        for name in layers[kind]:
            many = counts[name]
            row.append(Box(0, 34 + 74 * down, [name, f"x {many:,}"] if many > 1 else [name], title=name))
            boxes[name] = row[-1]
        widths.append(sum(box.width + 10 for box in row))
    total = max(640.0, *widths) if widths else 640.0
    for kind in order:
        row = [boxes[name] for name in layers[kind]]
        gap = (total - sum(box.width for box in row)) / len(row)
        x = gap / 2
        for box in row:
            box.x = x + box.width / 2
            x += box.width + gap
    return boxes


def _natural(name: str) -> list[object]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def heat_map(picture: dict[str, Any]) -> Figure | None:
    """Draw link usage over time; None without samples."""
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
