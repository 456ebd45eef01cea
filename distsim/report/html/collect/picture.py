"""The part of a report that only its picture needs.

Key `picture` of a report:
- `end_s`; `replay`, the command that shows the run again; `text`, the report as a terminal shows it
- `lanes[]` (`ranks`, `name`), `slices[]`, `calls[]`: `lanes.py`
- `messages[]` and `dangling[]`: `messages.py`
- `waits[]`: `ranks, needs, any_of, what, where`
- `stacks[]`: `stacks.py`; `sources[]`: `sources.py`; `links` over time: `usage.py`
- `faults[]`: from, to or null, text
- `left_out`: by part, a sentence on what was too much

Times are seconds since the run began.
"""

from __future__ import annotations

from typing import Any

from distsim.debug.diagnosis.waits.edges import wait_edges
from distsim.debug.report.render import render_diagnoses
from distsim.debug.report.stack_tree import blank_addresses
from distsim.report.html.collect.lanes import lanes
from distsim.report.html.collect.material import Material
from distsim.report.html.collect.messages import messages
from distsim.report.html.collect.sources import sources
from distsim.report.html.collect.stacks import stacks
from distsim.report.html.collect.usage import usage

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
