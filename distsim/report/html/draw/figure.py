"""Figures of plotly as plain data: what all of them share."""

from __future__ import annotations

import html
from typing import Any

__all__ = ["ACCUSED", "COMMUNICATION", "COMPUTE", "OPEN", "WAITING", "Figure", "figure", "label"]

Figure = dict[str, Any]

COMPUTE, COMMUNICATION, WAITING, OPEN, ACCUSED = "#4f86c6", "#2a9d6f", "#d9a13b", "#c8467a", "#d1495b"
"""Told apart by those who see few colours, on white and on black; waiting is hatched as well."""

LONGEST = 200
"""Letters of a text in a figure."""


def label(text: object) -> str:
    """A text of the program's for plotly, which takes tags and entities in texts for markup."""
    said = str(text)
    return html.escape(said if len(said) <= LONGEST else f"{said[: LONGEST - 3]}...", quote=False)


def figure(data: list[dict[str, Any]], height: int, x_title: str, **layout: Any) -> Figure:
    """Traces with a layout; colours of text and ground are the page's, which knows light and dark."""
    common: dict[str, Any] = {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 8, "b": 44},
        "xaxis": {"title": {"text": x_title}, "zeroline": False, "automargin": True},
        "yaxis": {"automargin": True, "zeroline": False},
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
        "dragmode": "pan",
    }
    for name, value in layout.items():
        both = isinstance(value, dict) and isinstance(common.get(name), dict)
        common[name] = {**common[name], **value} if both else value
    return {"data": data, "layout": common}
