"""Merged stacks as an icicle: outermost frames on top, as wide as ranks are in them."""

from __future__ import annotations

from typing import Any

from distsim.report.html.draw.figure import ACCUSED, COMPUTE, Figure, figure, label

__all__ = ["icicle"]

ROW_PX = 44
LEAST = 0.04
"""Of the whole: one rank of a thousand is what one looks for."""


def icicle(picture: dict[str, Any]) -> Figure | None:
    """None where no stacks were taken."""
    rows = picture["stacks"]
    if not rows:
        return None
    deep: list[int] = []
    for row in rows:
        deep.append(1 if row[2] is None else deep[row[2]] + 1)
    tops = sum(row[4] for row in rows if row[2] is None)
    wide = _widths(rows, LEAST * tops)
    everyone = [label(f"{tops:,} {'rank' if tops == 1 else 'ranks'}")]
    trace = {
        "type": "icicle",
        "ids": ["all", *(str(number) for number in range(len(rows)))],
        "parents": ["", *("all" if row[2] is None else str(row[2]) for row in rows)],
        "labels": everyone + [label(f"{function}  {place}") for function, place, *_ in rows],
        "values": [sum(w for w, row in zip(wide, rows, strict=True) if row[2] is None), *wide],
        "text": ["", *(label(f"{'rank' if row[4] == 1 else 'ranks'} {row[3]}") for row in rows)],
        "branchvalues": "total",
        "sort": False,
        "tiling": {"orientation": "v", "pad": 1},
        "textinfo": "label+text",
        "hovertemplate": "%{label}<br>%{text}<extra></extra>",
        "marker": {"colors": ["#8a8f98", *(ACCUSED if row[5] else COMPUTE for row in rows)]},
        "pathbar": {"visible": False},
    }
    return figure([trace], 40 + ROW_PX * (1 + max(deep)), "", margin={"l": 8, "r": 8, "t": 8, "b": 8})


def _widths(rows: list[Any], least: float) -> list[float]:
    """As many as there are ranks; few are drawn wider than they are, and whatever is above them with them."""
    inside = [0.0] * len(rows)
    found = [0.0] * len(rows)
    for number in range(len(rows) - 1, -1, -1):  # a frame comes after the one that called it
        found[number] = round(max(float(rows[number][4]), least, inside[number]), 6)
        parent = rows[number][2]
        if parent is not None:
            inside[parent] += found[number]
    return found
