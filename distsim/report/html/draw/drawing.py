"""Drawing of boxes and arrows for the template's SVG, which needs no script and can be printed.

Two things are drawn. In the wait-for graph, ranks with equal waits are one box, arrows point to the ranks that they
wait for, and cycles are red. In the used part of the cluster, the colour of an edge is the average share of its
bandwidth that was used; many equal vertices (`n0/gpu0`, `n1/gpu0`, ...) are one box with their number, whose edges
show the busiest of them. A heat map shows the used bandwidth of the busiest links over time, with injected faults as
bands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import networkx

from distsim.debug.messages import group_name, site_text
from distsim.debug.records import Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.report.html.draw.plots import ACCUSED, Figure, figure, label
from distsim.report.tables import time_unit
from distsim.text.ranks import format_ranks
from distsim.text.units import format_bandwidth

__all__ = ["Arrow", "Box", "Drawing", "arrow", "cluster", "heat_map", "scaled", "wait_graph"]

LETTER_PX = 7.0
LINE_PX = 16


Area = tuple[float, float, float, float]
TEXT_POSITIONS = (0.5, 0.4, 0.6, 0.3, 0.7, 0.22, 0.78)
"""Positions of a text along its arrow, the preferred one first."""


@dataclass(slots=True)
class Box:
    """A box around lines of text, centred at x, y (pixels)."""

    x: float
    y: float
    lines: Sequence[str]
    accused: bool = False
    title: str = ""

    @property
    def width(self) -> float:
        return max(44.0, LETTER_PX * max((len(line) for line in self.lines), default=0) + 16)

    @property
    def height(self) -> float:
        return LINE_PX * len(self.lines) + 10

    @property
    def area(self) -> Area:
        """Return the left, top, right and bottom edge."""
        return (
            self.x - self.width / 2,
            self.y - self.height / 2,
            self.x + self.width / 2,
            self.y + self.height / 2,
        )


@dataclass(slots=True)
class Arrow:
    """A bent line between two boxes with a text at its middle."""

    path: str
    text: Sequence[str] = ()
    at: tuple[float, float] = (0.0, 0.0)
    anchor: str = "middle"
    """Alignment of the text at *at*: start, middle or end."""
    points: tuple[tuple[float, float], ...] = ()
    """Start, control point and end of the curve."""
    accused: bool = False
    width: float = 1.5
    colour: str = ""
    title: str = ""

    def text_area(self, at: tuple[float, float]) -> Area:
        """Return the left, top, right and bottom edge of the text if it stands at *at*."""
        wide, high = LETTER_PX * max(map(len, self.text)), LINE_PX * len(self.text)
        left = at[0] - {"start": 0.0, "middle": wide / 2, "end": wide}[self.anchor]
        return left, at[1] - high / 2, left + wide, at[1] + high / 2


@dataclass(slots=True)
class Drawing:
    """A drawing with its size in pixels and its elements."""

    width: float
    height: float
    left: float = 0.0
    top: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    words: str = ""
    """Text alternative for readers who do not see the drawing."""

    def fit(self, margin: float = 12.0) -> None:
        """Set the size of the drawing to its content."""
        xs: list[float] = []
        ys: list[float] = []
        for box in self.boxes:
            xs += [box.x - box.width / 2, box.x + box.width / 2]
            ys += [box.y - box.height / 2, box.y + box.height / 2]
        for one in self.arrows:
            if one.text:
                left, top, right, bottom = one.text_area(one.at)
                xs += [left, right]
                ys += [top - 6, bottom + 6]
        self.left, self.top = min(xs) - margin, min(ys) - margin
        self.width, self.height = max(xs) + margin - self.left, max(ys) + margin - self.top


def arrow(start: Box, end: Box, text: Sequence[str] = (), *, accused: bool = False, bend: float = 0.12) -> Arrow:
    """Return an arrow between the borders of two boxes; arrows in both directions bend apart."""
    dx, dy = end.x - start.x, end.y - start.y
    middle_x, middle_y = start.x + dx / 2 - bend * dy, start.y + dy / 2 + bend * dx
    x0, y0 = _rim(start, middle_x, middle_y, 2)
    x1, y1 = _rim(end, middle_x, middle_y, 8)
    path = f"M{x0:.1f},{y0:.1f} Q{middle_x:.1f},{middle_y:.1f} {x1:.1f},{y1:.1f}"
    points = (x0, y0), (middle_x, middle_y), (x1, y1)
    aside = middle_x - start.x - dx / 2
    anchor = "middle" if abs(aside) < 12 else "start" if aside > 0 else "end"
    return Arrow(path, text, _on_curve(points, 0.5), anchor, points, accused)


def _on_curve(points: Sequence[tuple[float, float]], share: float) -> tuple[float, float]:
    """Return the point of a quadratic curve after *share* of its parameter."""
    weights = (1 - share) ** 2, 2 * share * (1 - share), share**2
    x, y = (sum(w * p[axis] for w, p in zip(weights, points, strict=True)) for axis in (0, 1))
    return x, y


def separate_texts(arrows: Sequence[Arrow], boxes: Sequence[Box]) -> None:
    """Move texts along their arrows until none covers a box or another text, as far as there is room.

    Texts of accused arrows are placed first.
    """
    taken = [box.area for box in boxes]
    for one in sorted((one for one in arrows if one.text), key=lambda one: not one.accused):
        choices = [_on_curve(one.points, share) for share in TEXT_POSITIONS]
        one.at = min(choices, key=lambda at: sum(_overlap(one.text_area(at), area) for area in taken))
        taken.append(one.text_area(one.at))


def _overlap(one: Area, other: Area) -> float:
    """Return the size of the area that both have in common, in square pixels."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, across) * max(0.0, down)


def _rim(box: Box, x: float, y: float, gap: float) -> tuple[float, float]:
    """Return the point at which the line from a box's center to x, y leaves the box."""
    dx, dy = x - box.x, y - box.y
    length = math.hypot(dx, dy)
    if length == 0.0:
        return box.x, box.y
    out = min(
        (box.width / 2) / abs(dx) if dx else math.inf,
        (box.height / 2) / abs(dy) if dy else math.inf,
    )
    share = min(out + gap / length, 1.0)
    return box.x + dx * share, box.y + dy * share


def scaled(places: Mapping[str, Sequence[float]], boxes: Mapping[str, Box], width: float, height: float) -> None:
    """Set the positions of the boxes from those of a layout, scaled to the pixels of the drawing."""
    xs, ys = [p[0] for p in places.values()], [p[1] for p in places.values()]
    room_x = width - max(box.width for box in boxes.values()) - 24
    room_y = height - max(box.height for box in boxes.values()) - 24
    for name, box in boxes.items():
        across = (places[name][0] - min(xs)) / ((max(xs) - min(xs)) or 1.0)
        down = (places[name][1] - min(ys)) / ((max(ys) - min(ys)) or 1.0)
        box.x = width / 2 + (across - 0.5) * room_x if max(xs) - min(xs) > 1e-9 else width / 2
        box.y = height / 2 + (down - 0.5) * room_y if max(ys) - min(ys) > 1e-9 else height / 2


LAYERS = ("gpu", "cpu", "nvswitch", "pcie", "nic", "leaf", "switch", "spine")
"""Layers of the drawing, from bottom to top."""
MOST_HOSTS, MOST_ALIKE = 2, 8
STEPS = ((0.9, "#b2182b"), (0.6, "#e08214"), (0.3, "#d9b13b"), (0.1, "#5aae61"), (0.0, "#7f8c9a"))
"""Colours with the share of bandwidth from which they are used."""
_NAME = re.compile(r"(?:n(\d+)/)?([A-Za-z_]+\d*/)?([A-Za-z_]+)(\d*)")
"""Pattern of vertex names such as `n0/gpu3`, `leaf2`, `group1/switch5`: host, group of the fabric, kind, number."""
ROW_PX = 18
TOPS = (1, 2, 5, 10, 25, 50, 100, 1e9)
"""Possible upper ends of the colour scale, in percent."""


@dataclass(slots=True)
class Edge:
    """Both directions of a pair of vertices, and of all pairs that are drawn as this one."""

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
    """Return the boxes with layers above each other and hosts side by side."""
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


MOST_BOXES = 40
MOST_TEXTS = 14
"""Number of arrows above which only those of a cycle have labels; the others show theirs under the pointer."""
LONGEST = 34
"""Largest number of characters in a line of a box."""


@dataclass(slots=True)
class DrawnWait:
    """A wait in the drawing: *ranks* wait for *needs*, as the lines describe."""

    ranks: Sequence[int]
    needs: Sequence[int]
    any_of: bool
    text: tuple[str, ...]


def wait_graph(picture: dict[str, Any] | None, diagnoses: Sequence[Diagnosis]) -> Drawing | None:
    """Draw the wait-for graph; None if no rank waits. Without a picture, the diagnoses are used."""
    shown = [d for d in diagnoses if d.stuck][:4]
    waits = _of_picture(picture)
    if not waits:
        waits = [wait for d in shown for wait in _of_diagnosis(d)]
    if not waits:
        return None
    circle = next((d.cycle for d in shown if d.cycle and len(d.cycle) > 1), ())
    accused = {rank for d in shown for rank in d.culprits}
    members = _boxes(waits, circle, accused)
    box_of = {rank: number for number, ranks in enumerate(members) for rank in ranks}
    edges: dict[tuple[int, int], DrawnWait] = {}
    for wait in waits:
        for source in {box_of[rank] for rank in wait.ranks if rank in box_of}:
            for target in {box_of[rank] for rank in wait.needs if rank in box_of}:
                if source != target:
                    edges.setdefault((source, target), wait)
    red = {(box_of[a], box_of[b]) for a, b in pairwise((*circle, *circle[:1])) if a in box_of and b in box_of}
    return _drawn(members, edges, red, accused, shown)


def _of_picture(picture: dict[str, Any] | None) -> list[DrawnWait]:
    if picture is None:
        return []
    return [
        DrawnWait(
            w["ranks"], w["needs"], bool(w["any_of"]), tuple(text for text in (str(w["what"]), str(w["where"])) if text)
        )
        for w in picture["waits"]
    ]


def _of_diagnosis(d: Diagnosis) -> list[DrawnWait]:
    """Return the waits of one diagnosis: each rank of a cycle waits for the next, other blocked ranks for the accused
    of their group."""
    after = dict(pairwise((*d.cycle, d.cycle[0]))) if d.cycle else {}
    merged: dict[tuple[object, ...], DrawnWait] = {}
    for rank, at in d.stuck.items():
        inside = set(at.group_ranks)
        needs = (
            (after[rank],)
            if rank in after
            else tuple(r for r in d.culprits if r != rank and (not inside or r in inside))
        )
        if rank in d.culprits and rank not in after:
            continue
        group = f" on {group_name(at.group)}" if at.group else ""
        number = f" #{at.seq}" if at.seq is not None and at.op not in ("send", "recv") else ""
        where = site_text(Site(at.file, at.line or 0, "")) if at.file else ""
        text = tuple(part for part in (f"{at.op}{number}{group}", where) if part)
        merged.setdefault((text, needs), DrawnWait([], needs, False, text))
        ranks = merged[text, needs].ranks
        assert isinstance(ranks, list)
        ranks.append(rank)
    return list(merged.values())


def _boxes(waits: Sequence[DrawnWait], circle: Sequence[int], accused: set[int]) -> list[list[int]]:
    """Return boxes of ranks with equal waits, those of a cycle first, then the accused."""
    waiting: dict[int, list[int]] = {}
    needed: dict[int, list[int]] = {}
    for number, wait in enumerate(waits):
        for rank in wait.ranks:
            waiting.setdefault(rank, []).append(number)
        for rank in wait.needs:
            needed.setdefault(rank, []).append(number)
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted({*waiting, *needed}):
        place_in = circle.index(rank) if rank in circle else None
        key = (place_in, rank in accused, tuple(waiting.get(rank, ())), tuple(needed.get(rank, ())))
        alike.setdefault(key, []).append(rank)
    # Other ranks of a group in the circle close it, too; the ranks of the circle itself come first.
    order = sorted(alike.items(), key=lambda item: (item[0][0] is None, not item[0][1], item[1]))
    return [ranks for _, ranks in order[:MOST_BOXES]]


def _drawn(
    members: list[list[int]],
    edges: dict[tuple[int, int], DrawnWait],
    red: set[tuple[int, int]],
    accused: set[int],
    diagnoses: Sequence[Diagnosis],
) -> Drawing:
    sites = {rank: site for d in diagnoses for rank, site in d.sites.items()}
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    boxes: dict[str, Box] = {}
    for number, ranks in enumerate(members):
        runs = format_ranks(ranks)
        who = ("rank " if len(ranks) == 1 else "ranks ") + (
            runs if len(runs) < 24 else f"{runs[:20]}... ({len(ranks):,})"
        )
        at = {site_text(site, through=False) for rank in ranks if (site := sites.get(rank)) is not None}
        lines = [who, *(_cut(line) for line in sorted(at)[:1])]
        boxes[str(number)] = Box(0, 0, lines, not accused.isdisjoint(ranks), title=runs)
        graph.add_node(str(number))
    graph.add_edges_from((str(a), str(b)) for a, b in edges)
    inner = [str(n) for n, ranks in enumerate(members) if any(n in pair for pair in red)]
    inner = inner or [str(n) for n, ranks in enumerate(members) if not accused.isdisjoint(ranks)] or [str(0)]
    outer = [name for name in boxes if name not in inner]
    size = 260 + 34 * max(len(inner), len(outer) // 2)
    width, height = min(1100.0, 520.0 + 40 * len(boxes)), float(min(size, 900))
    shells = networkx.shell_layout(graph, [shell for shell in (inner, outer) if shell])
    places = {name: (float(at[0]), float(at[1])) for name, at in shells.items()}
    if len(boxes) == 2:  # side by side
        places = {name: (float(number), 0.0) for number, name in enumerate([*outer, *inner])}
        height = 150.0
        longest = max((len(_cut(line)) for wait in edges.values() for line in wait.text), default=0)
        width = max(width, 2 * max(box.width for box in boxes.values()) + LETTER_PX * longest + 80)
    scaled(places, boxes, width, height)
    drawing = Drawing(width, height, boxes=list(boxes.values()))
    many = len(edges) > MOST_TEXTS
    for (source, target), wait in edges.items():
        is_red = (source, target) in red
        waiting = boxes[str(source)]
        texts = [line for line in map(_cut, wait.text) if line not in waiting.lines]  # its box has the line of source
        lines = ["any of", *texts] if wait.any_of else texts
        there_and_back = (target, source) in edges
        one = arrow(
            waiting,
            boxes[str(target)],
            lines if is_red or not many else (),
            accused=is_red,
            bend=0.3 if there_and_back else -0.16 if is_red else 0.1,
        )
        one.title = f"{waiting.lines[0]} in {', '.join(wait.text)}"
        drawing.arrows.append(one)
    separate_texts(drawing.arrows, drawing.boxes)
    drawing.fit()
    drawing.words = "; ".join(
        f"{boxes[str(a)].lines[0]} {'wait' if len(members[a]) > 1 else 'waits'} for {boxes[str(b)].lines[0]} in "
        f"{', '.join(wait.text)}"
        for (a, b), wait in edges.items()
    )
    return drawing


def _cut(line: str) -> str:
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
