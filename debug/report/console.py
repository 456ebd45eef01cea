"""The console that everything of distsim's is printed on: texts are shown as they are, and never obeyed.

Group names, exceptions and file names come from programs and files of anybody. Square brackets in them are no
markup, and an escape sequence (of a colour, a window title, a link, a direction of writing) is shown as its digits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TextIO

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from distsim.text.untrusted_input import printable

__all__ = ["Console", "piped_width", "stream_width"]

PLAIN_WIDTH = 120
"""Columns where the output is no terminal (a file, a CI log)."""


def piped_width(otherwise: int = PLAIN_WIDTH) -> int:
    """Columns of a report that goes into a pipe or a file: as COLUMNS says."""
    said = os.environ.get("COLUMNS", "")
    return int(said) if said.isascii() and said.isdigit() and int(said) > 0 else otherwise


def stream_width(stream: TextIO) -> int:
    """Columns of a report that goes to *stream*: as the terminal, or `piped_width`."""
    try:
        return piped_width(os.get_terminal_size(stream.fileno()).columns or PLAIN_WIDTH)
    except (AttributeError, OSError, ValueError):  # no terminal, or no file, or closed
        return piped_width()


class Console(rich.console.Console):
    """rich's, without markup and without highlighting in texts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich's, with every text made printable; control segments are rich's own."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
