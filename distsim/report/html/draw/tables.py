"""Tables of a run: columns with their units, and cells as text with the value used for sorting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsim.text.units import format_bandwidth, format_bytes, format_time

__all__ = ["PageTable", "TableCell", "of_run", "table"]

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


Shown = Callable[[Any], str]


def _time(value: Any) -> str:
    return "-" if value is None else format_time(float(value))


def _share(value: Any) -> str:
    return "-" if value is None else "<0.1%" if 0 < value < 0.0005 else f"{value:.1%}"


def _rate(value: Any) -> str:
    return format_bandwidth(float(value)) if value else "-"  # a barrier has none


def _bytes(value: Any) -> str:
    return "-" if value is None else format_bytes(value)


def _count(value: Any) -> str:
    return "-" if value is None else f"{value:,}"


def _plain(value: Any) -> str:
    return "-" if value is None else f"{value:,.4g}"


RANKS: dict[str, tuple[str, Shown | None]] = {
    "rank": ("rank", _count),
    "device": ("device", None),
    "phase": ("state", None),
    "exit_code": ("exit code", _count),
    "end_s": ("ran for", _time),
    "compute_s": ("compute", _time),
    "communication_s": ("communication", _time),
    "exposed_s": ("exposed", _time),
    "idle_s": ("idle", _time),
    "peak_memory_bytes": ("peak memory", _bytes),
}
COLLECTIVES: dict[str, tuple[str, Shown | None]] = {
    "group": ("group", None),
    "op": ("operation", None),
    "dtype": ("dtype", None),
    "num_ranks": ("ranks", _count),
    "count": ("calls", _count),
    "bytes": ("bytes", _bytes),
    "time_s": ("time", _time),
    "low_s": ("8 of 10 from", _time),
    "high_s": ("to", _time),
    "algbw_bytes_per_s": ("algbw", _rate),
    "busbw_bytes_per_s": ("busbw", _rate),
}
LINKS: dict[str, tuple[str, Shown | None]] = {
    "name": ("link", None),
    "kind": ("kind", None),
    "bandwidth_bytes_per_s": ("speed", _rate),
    "bytes": ("bytes", _bytes),
    "busy_s": ("busy", _time),
    "mean_utilisation": ("mean utilization", _share),
    "peak_utilisation": ("peak utilization", _share),
}
STEPS: dict[str, tuple[str, Shown | None]] = {
    "rank": ("rank", _count),
    "alike": ("equal ranks", _count),
    "step_s": ("step", _time),
    "compute_s": ("compute", _time),
    "overlapped_s": ("overlapped", _time),
    "exposed_s": ("exposed", _time),
    "late_s": ("late ranks", _time),
    "bubble_s": ("bubble", _time),
    "host_s": ("host", _time),
    "peak_allocated_bytes": ("allocated", _bytes),
    "peak_reserved_bytes": ("reserved", _bytes),
}
OPERATORS: dict[str, tuple[str, Shown | None]] = {
    "name": ("operator", None),
    "count": ("per step", _plain),
    "time_s": ("time", _time),
}
PATH: dict[str, tuple[str, Shown | None]] = {
    "kind": ("kind", None),
    "name": ("operation", None),
    "time_s": ("time", _time),
}
GAINS: dict[str, tuple[str, Shown | None]] = {
    "name": ("change", None),
    "how": ("effect", None),
    "step_s": ("step time with it", _time),
}
CALLS: dict[str, tuple[str, Shown | None]] = {
    "rank": ("rank", _count),
    "call": ("call", None),
    "line": ("line", None),
    "bytes": ("bytes", _bytes),
    "state": ("state", None),
    "issued_s": ("called at", _time),
    "started_s": ("all ranks arrived at", _time),
    "completed_s": ("ended at", _time),
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
        table("Ranks", RANKS, document.get("ranks") or ()),
        table("Collectives and messages", COLLECTIVES, document.get("collectives") or ()),
        table("Links that carried traffic", LINKS, links),
        table("Calls of the timeline", CALLS, calls),
    ]
    return [one for one in tables if one.rows]


def table(title: str, fields: Mapping[str, tuple[str, Shown | None]], items: Sequence[Mapping[str, Any]]) -> PageTable:
    """Return a table with one row for each item. Columns that no item has are left out."""
    used = {name: how for name, how in fields.items() if any(item.get(name) is not None for item in items)}
    result = PageTable(title, [head for head, _ in used.values()])
    for item in items[:MOST_ROWS]:
        row = []
        for name, (_, show) in used.items():
            value = item.get(name)
            if show is None:
                row.append(TableCell("-" if value is None else str(value)))
            else:
                row.append(TableCell(show(value), None if value is None else float(value)))
        result.rows.append(row)
    if len(items) > MOST_ROWS:
        result.rest = f"The first {MOST_ROWS:,} of {len(items):,}; the JSON has all."
    return result
