"""The part of a report that only its picture needs.

Key `picture` of a report:
- `end_s`; `replay`, the command that shows the run again; `text`, the report as a terminal shows it
- `lanes[]` (`ranks`, `name`), `slices[]`, `calls[]`: `lanes.py`
- `messages[]` and `dangling[]`: `messages.py`
- `waits[]`: `ranks, needs, any_of, what, where`
- `stacks[]`, `sources[]`, `links` over time: here
- `faults[]`: from, to or null, text
- `left_out`: by part, a sentence on what was too much

Times are seconds since the run began.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distsim.debug.diagnosis.waits.edges import wait_edges
from distsim.debug.messages import place
from distsim.debug.records import Site
from distsim.debug.report.render import render_diagnoses, stack_of
from distsim.debug.report.stack_tree import StackNode, blank_addresses, merge_stacks
from distsim.report.html.collect.lanes import lanes
from distsim.report.html.collect.material import Material
from distsim.report.html.collect.messages import messages
from distsim.text.ranks import format_ranks

__all__ = ["picture"]


WIDTH = 110
MOST_NEEDS = 64
"""Waits drawn of the wait-for graph."""


def picture(material: Material, replay: str = "") -> dict[str, Any]:
    """Everything that is drawn, as JSON data; *replay* is the command that shows the run again."""
    found: dict[str, Any] = {"end_s": material.end_s, "replay": replay, "left_out": {}}
    found.update(lanes(material, found["left_out"]))
    found.update(messages(material, found["left_out"]))
    found["waits"] = _waits(material, found["left_out"])
    found["stacks"] = stacks(material)
    found["links"] = usage(material)
    found["faults"] = [list(fault) for fault in material.faults]
    found["sources"] = sources(material)
    if material.diagnoses:
        text = render_diagnoses(material.diagnoses, material.evidence).plain(WIDTH)
        found["text"] = blank_addresses(text)
    return found


def _waits(material: Material, left_out: dict[str, str]) -> list[dict[str, Any]]:
    if material.evidence is None or not (material.diagnoses or material.snapshot):
        return []
    edges = wait_edges(material.evidence)
    if len(edges) > MOST_NEEDS:
        left_out["waits"] = f"{MOST_NEEDS} of {len(edges):,} different waits are drawn."
    return [
        {"ranks": e.ranks, "needs": list(e.needs), "any_of": e.any_of, "what": e.what, "where": e.where}
        for e in edges[:MOST_NEEDS]
    ]


MOST_LINKS = 48


def usage(material: Material) -> dict[str, Any] | None:
    """None where nobody took samples (a real run), or nothing moved."""
    samples: dict[int, list[tuple[float, float]]] = {}
    for time_s, index, fraction in material.link_samples:
        samples.setdefault(index, []).append((time_s, fraction))
    if not samples:
        return None
    times = sorted({time_s for changes in samples.values() for time_s, _ in changes})
    rows: list[tuple[float, int, list[float]]] = []
    for index, changes in samples.items():
        values = dict(changes)
        row: list[float] = []
        now = 0.0
        for time_s in times:
            now = values.get(time_s, now)
            row.append(now)
        rows.append((-sum(row), index, row))
    rows.sort(key=lambda one: one[:2])
    alike: dict[tuple[float, ...], list[str]] = {}
    for _, index, row in rows:
        alike.setdefault(tuple(round(value, 3) for value in row), []).append(material.link_names[index])
    chosen = list(alike.items())[:MOST_LINKS]
    return {
        "names": [names[0] + (f" (and {len(names) - 1} alike)" if names[1:] else "") for _, names in chosen],
        "times_s": [round(time_s, 9) for time_s in times],
        "rows": [list(row) for row, _ in chosen],
    }


MOST_FRAMES = 600


def stacks(material: Material) -> list[list[Any]]:
    """Empty where nobody is stuck."""
    evidence = material.evidence
    if evidence is None or not (material.diagnoses or material.snapshot):
        return []
    found = {rank: stack for rank in evidence.ranks if (stack := stack_of(rank, evidence))}
    accused = {rank for d in material.diagnoses if d.exit_code for rank in d.culprits}
    rows: list[list[Any]] = []
    todo: list[tuple[StackNode, int | None]] = [(node, None) for node in merge_stacks(found).ordered()]
    while todo and len(rows) < MOST_FRAMES:  # breadth first: what is cut off lies innermost
        node, parent = todo.pop(0)
        assert node.site is not None
        rows.append(
            [
                node.site.function,
                place(node.site, through=False),
                parent,
                format_ranks(node.ranks),
                len(node.ranks),
                accused.issuperset(node.ranks),
            ]
        )
        todo += [(child, len(rows) - 1) for child in node.ordered()]
    return rows


BEFORE, AFTER = 3, 3
MOST_SITES = 40
LONGEST = 300
"""Letters of a line."""


def sources(material: Material) -> list[dict[str, Any]]:
    """The culprits' places first, each once."""
    texts: Mapping[str, str] = {} if material.evidence is None else material.evidence.sources
    ranks: dict[Site, set[int]] = {}
    for d in material.diagnoses:
        accused = set(d.culprits)
        for rank in (*d.culprits, *(r for r in d.sites if r not in accused)):
            if (site := d.sites.get(rank)) is not None and (site in ranks or len(ranks) < MOST_SITES):
                ranks.setdefault(site, set()).add(rank)
    found = []
    for site, at in ranks.items():
        lines = texts.get(site.file, "").splitlines()
        if not 0 < site.line <= len(lines):
            continue
        first = max(1, min(site.line - BEFORE + 1, len(lines) - BEFORE - AFTER + 1))
        shown = [line[:LONGEST] for line in lines[first - 1 : first - 1 + BEFORE + AFTER]]
        found.append(
            {
                "file": site.file,
                "line": site.line,
                "function": site.function,
                "ranks": sorted(at),
                "first": first,
                "lines": shown,
            }
        )
    return found
