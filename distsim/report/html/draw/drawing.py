"""The wait-for graph, the used part of the cluster, and the use of its links over time.

In the wait-for graph, ranks with equal waits are one box, arrows point to the ranks that they wait for, and cycles are
red. In the cluster, the colour of an edge is the average share of its bandwidth that was used; many equal vertices
(`n0/gpu0`, `n1/gpu0`, ...) are one box with their number, whose edges show the busiest of them. A heat map shows the
used bandwidth of the busiest links over time, with injected faults as bands.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import networkx

from distsim.debug.messages import group_name, site_text
from distsim.debug.records import Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.report.html.draw.plots import ACCUSED, GREY, Figure, band, figure, label
from distsim.report.tables import time_unit
from distsim.text.ranks import format_ranks
from distsim.text.units import format_bandwidth
from distsim.text.untrusted_input import digits

Position = tuple[float, float]
"""Where a box stands, across and upwards, in pixels of the narrowest picture."""


def _box(position: Position, lines: Sequence[str], accused: bool = False, title: str = "") -> dict[str, Any]:
    """Return a box around lines of text, of which the first is the name. The page sets its ground."""
    small = (f'<span style="font-size: 11px">{label(line)}</span>' for line in lines[1:])
    return {
        "x": position[0],
        "y": position[1],
        "text": "<br>".join([label(lines[0]), *small]),
        "hovertext": label(title),
        "showarrow": False,
        "bgcolor": "#ffffff",
        "bordercolor": ACCUSED if accused else GREY,
        "borderwidth": 2 if accused else 1,
        "borderpad": 5,
    }


def _lines(name: str, colour: str, width: float, points: Iterable[tuple[Position, str, int]]) -> dict[str, Any]:
    """Return lines through *points*, each with a text for the pointer and the size of its arrow; a point without a text
    ends a line.
    """
    positions, texts, sizes = zip(*points, strict=True)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [x if text else None for (x, _), text in zip(positions, texts, strict=True)],
        "y": [y if text else None for (_, y), text in zip(positions, texts, strict=True)],
        "hovertext": [label(text) for text in texts],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "line": {"width": width, "color": colour, "backoff": 0},
        "marker": {
            "symbol": "arrow",
            "angleref": "previous",
            "size": list(sizes),
            "opacity": 1,
            "color": colour,
            "line": {"width": 0},
        },
    }


def _between(start: Position, end: Position, share: float) -> Position:
    return start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])


def _graph(
    traces: list[dict[str, Any]],
    notes: list[dict[str, Any]],
    positions: Iterable[Position],
    margin: tuple[float, float],
    words: str,
) -> Figure:
    """Return a picture that needs a pixel for each unit of its axes at least. *margin* is the room that boxes at its
    edges and their texts need, across and down; *words* are for readers who do not see it.
    """
    axes, size = {}, []
    for name, values, room in zip(("xaxis", "yaxis"), zip(*positions, strict=True), margin, strict=True):
        low, high = min(values) - room, max(values) + room
        axes[name] = {"visible": False, "fixedrange": True, "range": [low, high]}
        size.append(round(high - low))
    above = 30 if any(trace["name"] for trace in traces) else 0
    return figure(
        traces,
        size[1] + above,
        "",
        annotations=notes,
        showlegend=True,
        margin={"l": 0, "r": 0, "t": above, "b": 0},
        meta={"width": size[0], "words": words},
        **axes,
    )


LAYERS = ("gpu", "cpu", "nvswitch", "pcie", "nic", "leaf", "switch", "spine")
"""Layers of the cluster, from bottom to top."""
MOST_HOSTS, MOST_ALIKE = 2, 8
STEPS = ((0.9, "#b2182b"), (0.6, "#e08214"), (0.3, "#d9b13b"), (0.1, "#5aae61"), (0.0, "#7f8c9a"))
"""Colours with the share of bandwidth from which they are used."""
APART_PX = 90, 74
"""Pixels from one box of the cluster to the next, across and up."""
TOUCHED = 12
"""Parts of a line of the cluster, at whose ends a pointer finds it."""
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


def cluster(links: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw the cluster; None if no link carried traffic or the link names are unknown."""
    ends = [tuple(str(link["name"]).split("->", 1)) for link in links]
    names = {name for pair in ends if len(pair) == 2 for name in pair}
    drawn_as = _folded(names)
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
    if not edges:
        return None
    counts = Counter(drawn_as.values())
    layers: dict[str, list[str]] = {}
    for name in sorted(counts, key=_natural):
        layers.setdefault(_kind(name), []).append(name)
    order = sorted(layers, key=lambda kind: LAYERS.index(kind) if kind in LAYERS else -1)
    across = max(320, APART_PX[0] * max(map(len, layers.values())))
    positions = {
        name: ((number + 0.5) / len(layers[kind]) * across, float(up * APART_PX[1]))
        for up, kind in enumerate(order)
        for number, name in enumerate(layers[kind])
    }
    points: dict[tuple[float, str], list[tuple[Position, str, int]]] = {}
    for (one, other), edge in edges.items():
        rate = format_bandwidth(edge.bandwidth) if edge.bandwidth else "unlimited"
        text = f"{one} - {other}: {rate}, {edge.mean:.1%} in use on average, {edge.peak:.0%} at its peak"
        text += f" (the busiest of {edge.count:,} links)" if edge.count > 2 else ""
        along = (_between(positions[one], positions[other], part / TOUCHED) for part in range(TOUCHED + 1))
        line = [*((position, text, 0) for position in along), (positions[other], "", 0)]
        points.setdefault(next(step for step in STEPS if edge.mean >= step[0]), []).extend(line)
    traces = [
        _lines(f"from {least:.0%}" if least else f"below {STEPS[-2][0]:.0%}", colour, 1.5 + 3.5 * least, line)
        for (least, colour), line in sorted(points.items(), reverse=True)
    ]
    notes = [
        _box(position, [name, f"x {counts[name]:,}"] if counts[name] > 1 else [name], title=name)
        for name, position in positions.items()
    ]
    words = f"{len(names):,} parts in {len(layers)} layers, {len(links):,} links that carried bytes"
    return _graph(traces, notes, positions.values(), (50, 30), words)


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


def _natural(name: str) -> list[object]:
    return [(1, 0, part) if (n := digits(part)) is None else (0, n, "") for part in re.split(r"(\d+)", name)]


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
        shapes.append(band(begin * scale, to, ACCUSED, 0.25) | {"line": {"width": 1, "color": ACCUSED}})
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
"""Number of arrows above which only those of a cycle have texts; the others show theirs under the pointer."""
LONGEST = 34
"""Largest number of characters in a line of a box."""
SIDE_PX, WIDEST_PX, HIGHEST_PX = 480, 450, 400
"""Pixels from one of two boxes to the other, and from the middle to the box that is farthest to the side or up."""


@dataclass(slots=True)
class DrawnWait:
    """A wait in the drawing: *ranks* wait for *needs*, as the lines describe."""

    ranks: Sequence[int]
    needs: Sequence[int]
    any_of: bool
    text: tuple[str, ...]


def wait_graph(picture: dict[str, Any] | None, diagnoses: Sequence[Diagnosis]) -> Figure | None:
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
    order = sorted(alike.items(), key=lambda item: (item[0][0] is None, item[0][0], not item[0][1], item[1]))
    return [ranks for _, ranks in order[:MOST_BOXES]]


def _drawn(
    members: list[list[int]],
    edges: dict[tuple[int, int], DrawnWait],
    red: set[tuple[int, int]],
    accused: set[int],
    diagnoses: Sequence[Diagnosis],
) -> Figure:
    sites = {rank: site for d in diagnoses for rank, site in d.sites.items()}
    of_box: list[list[str]] = []
    for ranks in members:
        runs = format_ranks(ranks)
        who = runs if len(runs) < 24 else f"{runs[:20]}... ({len(ranks):,})"
        at = {site_text(site, through=False) for rank in ranks if (site := sites.get(rank)) is not None}
        of_box.append([("rank " if len(ranks) == 1 else "ranks ") + who, *map(_cut, sorted(at)[:1])])
    inner = [number for number in range(len(members)) if any(number in pair for pair in red)]
    inner = inner or [number for number, ranks in enumerate(members) if not accused.isdisjoint(ranks)] or [0]
    outer = [number for number in range(len(members)) if number not in inner]
    positions = _positions(inner, outer)
    points: dict[bool, list[tuple[Position, str, int]]] = {False: [], True: []}
    notes = []
    for (source, target), wait in edges.items():
        is_red, start, end = (source, target) in red, positions[source], positions[target]
        at_arrow = _between(start, end, 0.6 if (target, source) in edges else 0.5)
        title = f"{of_box[source][0]} in {', '.join(wait.text)}"
        points[is_red] += [(start, title, 0), (at_arrow, title, 14), (end, title, 0), (end, "", 0)]
        if is_red or len(edges) <= MOST_TEXTS:
            texts = [line for line in map(_cut, wait.text) if line not in of_box[source]]
            lines = ["any of", *texts] if wait.any_of else texts
            notes.append(_beside(at_arrow, (end[0] - start[0], end[1] - start[1]), lines, is_red))
    traces = [
        _lines("", ACCUSED if is_red else GREY, 2.5 if is_red else 1.5, line) | {"showlegend": False}
        for is_red, line in points.items()
        if line
    ]
    notes += [
        _box(positions[number], of_box[number], not accused.isdisjoint(ranks), format_ranks(ranks))
        for number, ranks in enumerate(members)
    ]
    words = "; ".join(
        f"{of_box[a][0]} {'wait' if len(members[a]) > 1 else 'waits'} for {of_box[b][0]} in {', '.join(wait.text)}"
        for (a, b), wait in edges.items()
    )
    return _graph(traces, notes, positions.values(), (120 if len(members) == 2 else 160, 40), words)


def _positions(inner: Sequence[int], outer: Sequence[int]) -> dict[int, Position]:
    """Return the positions of boxes: *outer* in a ring around *inner*, clockwise; of two boxes, side by side."""
    if len(inner) + len(outer) == 2:
        return {number: (SIDE_PX * step, 0.0) for step, number in enumerate([*outer, *inner])}
    shells = networkx.shell_layout(networkx.empty_graph([*inner, *outer]), [shell for shell in (inner, outer) if shell])
    farthest = max(abs(value) for at in shells.values() for value in at)
    across = min(WIDEST_PX, 240.0 + 20 * len(shells)) / farthest
    up = min(HIGHEST_PX, 140.0 + 17 * max(len(inner), len(outer) // 2)) / farthest
    return {number: (across * float(x), -up * float(y)) for number, (x, y) in shells.items()}


def _beside(position: Position, way: tuple[float, float], lines: Sequence[str], accused: bool) -> dict[str, Any]:
    """Return a text to the left of an arrow, as seen along its *way*: on a circle outside, and of two arrows between
    two boxes one on each side.
    """
    note = {"x": position[0], "y": position[1], "text": "<br>".join(map(label, lines)), "showarrow": False}
    up = 1 if way[0] > 0 else -1 if way[0] < 0 else 0
    if abs(way[1]) < abs(way[0]) / 4:
        side: dict[str, Any] = {"yanchor": "bottom" if up > 0 else "top", "yshift": 6 * up}
    else:
        right = way[1] < 0
        side = {"xanchor": "left" if right else "right", "xshift": 8 if right else -8, "yshift": 8 * up}
    return note | side | ({"font": {"color": ACCUSED}} if accused else {})


def _cut(line: str) -> str:
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
