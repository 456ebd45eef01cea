"""A drawing of boxes and arrows, as numbers for the template's SVG: it needs no script, and prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Arrow", "Box", "Drawing", "arrow", "scaled"]

LETTER_PX = 7.0
LINE_PX = 16


@dataclass(slots=True)
class Box:
    """A box round its lines of text, centred at x, y (pixels)."""

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


@dataclass(slots=True)
class Arrow:
    """A bent line from box to box with a text at its middle."""

    path: str
    text: Sequence[str] = ()
    at: tuple[float, float] = (0.0, 0.0)
    anchor: str = "middle"
    """Alignment of the text at *at*: start, middle or end."""
    accused: bool = False
    width: float = 1.5
    colour: str = ""
    title: str = ""


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
                wide = LETTER_PX * max(map(len, one.text))
                left = one.at[0] - {"start": 0.0, "middle": wide / 2, "end": wide}[one.anchor]
                xs += [left, left + wide]
                ys += [one.at[1] - LINE_PX * len(one.text) / 2 - 6, one.at[1] + LINE_PX * len(one.text) / 2 + 6]
        self.left, self.top = min(xs) - margin, min(ys) - margin
        self.width, self.height = max(xs) + margin - self.left, max(ys) + margin - self.top


def arrow(start: Box, end: Box, text: Sequence[str] = (), *, accused: bool = False, bend: float = 0.12) -> Arrow:
    """Return an arrow between the borders of two boxes; arrows in both directions bend apart."""
    dx, dy = end.x - start.x, end.y - start.y
    middle_x, middle_y = start.x + dx / 2 - bend * dy, start.y + dy / 2 + bend * dx
    x0, y0 = _rim(start, middle_x, middle_y, 2)
    x1, y1 = _rim(end, middle_x, middle_y, 8)
    path = f"M{x0:.1f},{y0:.1f} Q{middle_x:.1f},{middle_y:.1f} {x1:.1f},{y1:.1f}"
    at = 0.25 * x0 + 0.5 * middle_x + 0.25 * x1, 0.25 * y0 + 0.5 * middle_y + 0.25 * y1
    aside = middle_x - start.x - dx / 2
    anchor = "middle" if abs(aside) < 12 else "start" if aside > 0 else "end"
    return Arrow(path, text, at, anchor, accused)


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
    """Set the boxes' places from those of a layout, which lie anywhere, into the pixels of a drawing."""
    xs, ys = [p[0] for p in places.values()], [p[1] for p in places.values()]
    room_x = width - max(box.width for box in boxes.values()) - 24
    room_y = height - max(box.height for box in boxes.values()) - 24
    for name, box in boxes.items():
        across = (places[name][0] - min(xs)) / ((max(xs) - min(xs)) or 1.0)
        down = (places[name][1] - min(ys)) / ((max(ys) - min(ys)) or 1.0)
        box.x = width / 2 + (across - 0.5) * room_x if max(xs) - min(xs) > 1e-9 else width / 2
        box.y = height / 2 + (down - 0.5) * room_y if max(ys) - min(ys) > 1e-9 else height / 2
