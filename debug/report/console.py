"""The console for all output of distsim, and the lines of a report: how they wrap, and what is shortened.

Group names, exceptions and file names come from any program or file. Square brackets in them are not markup, and
escape sequences (colours, window titles, links, writing directions) are shown as their characters.
"""

from __future__ import annotations

import io
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from distsim.text.untrusted_input import printable

PLAIN_WIDTH = 120
"""Columns if the output is not a terminal (a file, a CI log)."""
LONGEST_LINE = 1_000
"""Letters of a line of a traceback."""

MAX_TRACEBACK_LINES = 24, 200
"""Maximum number of lines of a traceback with many diagnoses, and with few.

Lines in the middle are cut: the last ones name the error, the first ones the way in.
"""
_COMMA = re.compile(r"(?<=\d,)(?=\d)")
MANY = 4
"""Number of diagnoses or exceptions above which they are shortened."""


def piped_width(otherwise: int = PLAIN_WIDTH) -> int:
    """Return the width of a report that is written to a pipe or a file: that of COLUMNS."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isascii() and columns.isdigit() and int(columns) > 0 else otherwise


def stream_width(stream: TextIO) -> int:
    """Return columns of a report that goes to *stream*: as the terminal, or `piped_width`."""
    try:
        return piped_width(os.get_terminal_size(stream.fileno()).columns or PLAIN_WIDTH)
    except (AttributeError, OSError, ValueError):  # no terminal, or no file, or closed
        return piped_width()


class Console(rich.console.Console):
    """The console of rich, without markup and without highlighting in texts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render like rich, with every text made printable; control segments come from rich."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print like rich; a file or a pipe gets no blanks at the ends of lines."""
        if self.is_terminal or self.is_jupyter:
            super().print(*objects, **options)
            return
        with self.capture() as capture:
            super().print(*objects, **options)
        self.file.write(re.sub(" +$", "", capture.get(), flags=re.MULTILINE))
        self.file.flush()


def plain_text(shown: RenderableType, width: int) -> str:
    """Return what a console of *width* columns would show, as text without colour."""
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, force_terminal=False)
    console.print(shown, crop=False)  # lines of a traceback stay whole
    return file.getvalue()


@dataclass(frozen=True, slots=True)
class Line:
    """One paragraph of the report; it wraps under its own text, code (`whole`) does not."""

    text: str
    indent: int = 2
    hang: int = 2
    style: str = ""
    whole: bool = False

    def wrapped(self, width: int) -> Iterable[Text]:
        """Return the text wrapped to *width* columns."""
        first = " " * self.indent
        if self.whole:
            return [Text(first + self.text, style=self.style, no_wrap=True, overflow="ignore")]
        wrapped = _Wrapper(
            width=max(20, width),
            initial_indent=first,
            subsequent_indent=first + " " * self.hang,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        ).wrap(self.text)
        return [Text(part, style=self.style, no_wrap=True, overflow="ignore") for part in wrapped or [first]]


class _Wrapper(textwrap.TextWrapper):
    """Text wrapper that breaks lists of ranks, which have no spaces, but no other long word."""

    def _split(self, text: str) -> list[str]:
        longest = self.width - len(self.subsequent_indent)
        parts: list[str] = []
        for word in super()._split(text):
            parts += [word] if len(word) <= longest else _COMMA.split(word)
        return parts


def most_lines(number: int) -> int:
    """Return lines of the traceback of each of *number* diagnoses or exceptions."""
    return MAX_TRACEBACK_LINES[0] if number > MANY else MAX_TRACEBACK_LINES[1]


def shortened(lines: Sequence[str], most: int, where: str = "--report FILE has them") -> list[str]:
    """Return *lines* without superfluous ones in the middle, and with overlong ones cut."""
    kept = [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..." for line in lines]
    if len(kept) <= most:
        return kept
    first = most // 3
    return [*kept[:first], f"... ({len(kept) - most + 1} more lines; {where})", *kept[first - most + 1 :]]
