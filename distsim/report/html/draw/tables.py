"""Tables of a run: columns with their units, and cells as text with the value used for sorting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsim.text.units import format_bandwidth, format_bytes, format_time

MOST_ROWS = 2_000


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell of a table; *value* is a number if the column is numeric."""

    text: str
    value: float | None = None
    link: str = ""
    bad: bool = False


@dataclass(slots=True)
class PageTable:
    """A table of the page; *rest* is the line below it that counts the rows left out."""

    title: str
    columns: Sequence[str]
    rows: list[list[TableCell]] = field(default_factory=list)
    rest: str = ""

    @property
    def heads(self) -> list[tuple[str, bool]]:
        """Return each column and whether it is numeric."""
        return [(head, any(row[n].value is not None for row in self.rows)) for n, head in enumerate(self.columns)]


RANKS = {
    "rank": "rank",
    "device": "device",
    "phase": "state",
    "exit_code": "exit code",
    "end_s": "ran for",
    "compute_s": "compute",
    "communication_s": "communication",
    "exposed_s": "exposed",
    "idle_s": "idle",
    "peak_memory_bytes": "peak memory",
}
ON_HOST = RANKS | {"compute_s": "CPU work", "idle_s": "CPU idle"}
"""Heads of a run with GPUs, whose own times are in another table."""
COLLECTIVES = {
    "group": "group",
    "op": "operation",
    "dtype": "dtype",
    "num_ranks": "ranks",
    "count": "calls",
    "bytes": "bytes",
    "time_s": "time",
    "low_s": "8 of 10 from",
    "high_s": "to",
    "algbw_bytes_per_s": "algbw",
    "busbw_bytes_per_s": "busbw",
}
LINKS = {
    "name": "link",
    "kind": "kind",
    "bandwidth_bytes_per_s": "speed",
    "bytes": "bytes",
    "busy_s": "busy",
    "mean_utilisation": "mean utilization",
    "peak_utilisation": "peak utilization",
}
STEPS = {
    "rank": "rank",
    "alike": "equal ranks",
    "step_s": "step",
    "compute_s": "compute",
    "overlapped_s": "overlapped",
    "exposed_s": "exposed",
    "late_s": "late ranks",
    "bubble_s": "bubble",
    "host_s": "host",
    "peak_allocated_bytes": "allocated",
    "peak_reserved_bytes": "reserved",
}
OPERATORS = {
    "name": "operator",
    "count": "per step",
    "time_s": "time",
}
PATH = {
    "kind": "kind",
    "name": "operation",
    "time_s": "time",
}
GAINS = {
    "name": "change",
    "how": "effect",
    "step_s": "step time with it",
}
CALLS = {
    "rank": "rank",
    "call": "call",
    "line": "line",
    "bytes": "bytes",
    "state": "state",
    "issued_s": "called at",
    "started_s": "all ranks arrived at",
    "completed_s": "ended at",
}


def of_run(document: Mapping[str, Any]) -> list[PageTable]:
    """Return the tables of a run that have rows."""
    links = sorted(document.get("links") or (), key=lambda link: -float(link["mean_utilisation"] or 0.0))
    picture = document.get("picture") or {}
    # What never ended first: it is the story of a hang.
    calls = sorted(picture.get("calls") or (), key=lambda c: (c["completed_s"] is not None, c["rank"], c["issued_s"]))
    training = document.get("training") or {}
    tables = [
        table("Mean training step of each rank", STEPS, training.get("ranks") or ()),
        table("Operators of one step", OPERATORS, training.get("operators") or ()),
        table("Critical path of the last step", PATH, training.get("critical_path") or ()),
        table("Possible speed-ups", GAINS, training.get("gains") or ()),
        table("Ranks", ON_HOST if document.get("training") else RANKS, document.get("ranks") or ()),
        table("Collectives and messages", COLLECTIVES, document.get("collectives") or ()),
        table("Links that carried traffic", LINKS, links),
        table("Calls of the timeline", CALLS, calls),
    ]
    return [one for one in tables if one.rows]


def table(title: str, heads: Mapping[str, str], items: Sequence[Mapping[str, Any]]) -> PageTable:
    """Return a table with one row for each item and a column for each of *heads*, but for those that no item has."""
    used = {name: head for name, head in heads.items() if any(item.get(name) is not None for item in items)}
    result = PageTable(title, list(used.values()))
    result.rows = [[_cell(name, item.get(name)) for name in used] for item in items[:MOST_ROWS]]
    if len(items) > MOST_ROWS:
        result.rest = f"The first {MOST_ROWS:,} of {len(items):,}; the JSON has all."
    return result


def _cell(name: str, value: Any) -> TableCell:
    """Return a value as text; the end of its name is its unit."""
    if not isinstance(value, int | float):
        return TableCell("-" if value is None else str(value))
    unit = "bytes/s" if name.endswith("_bytes_per_s") else name.rpartition("_")[2]
    if unit == "bytes/s":
        text = format_bandwidth(value) if value else "-"  # a barrier has none
    elif unit == "utilisation":
        text = "<0.1%" if 0 < value < 0.0005 else f"{value:.1%}"
    elif unit == "bytes":
        text = format_bytes(value)
    elif unit in ("s", "us"):
        text = format_time(value if unit == "s" else value * 1e-6)
    else:
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return TableCell(text, float(value))
