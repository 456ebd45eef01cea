"""Draws the wait-for graph: ranks with equal waits are one box, arrows lead to what they wait for, cycles are red."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import networkx

from distsim.debug.messages import site_text
from distsim.debug.records import Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.report.html.draw.drawing import LETTER_PX, Box, Drawing, arrow, scaled
from distsim.text.ranks import format_ranks

__all__ = ["wait_graph"]

MOST_BOXES = 40
MOST_TEXTS = 14
"""Number of arrows above which only those of a cycle have labels; the others show theirs under the pointer."""
LONGEST = 34
"""Letters of a line in a box."""


@dataclass(slots=True)
class DrawnWait:
    """*ranks* wait in what the lines say, for *needs*."""

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
        group = f" on {at.group}" if at.group else ""
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
    # A circle that a group's wait closes, too, is told by the ranks of the circle.
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
        lines = [_cut(line) for line in (*(("any of",) if wait.any_of else ()), *wait.text)]
        there_and_back = (target, source) in edges
        one = arrow(
            boxes[str(source)],
            boxes[str(target)],
            lines if is_red or not many else (),
            accused=is_red,
            bend=0.3 if there_and_back else -0.16 if is_red else 0.1,
        )
        one.title = f"{boxes[str(source)].lines[0]} in {', '.join(wait.text)}"
        drawing.arrows.append(one)
    drawing.fit()
    drawing.words = "; ".join(
        f"{boxes[str(a)].lines[0]} {'wait' if len(members[a]) > 1 else 'waits'} for {boxes[str(b)].lines[0]} in "
        f"{', '.join(wait.text)}"
        for (a, b), wait in edges.items()
    )
    return drawing


def _cut(line: str) -> str:
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
