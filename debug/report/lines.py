"""The lines of a report: how one wraps, and what is left of many."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.text import Text

__all__ = ["Line", "most_lines", "shortened"]

LONGEST_LINE = 1_000
"""Letters of a line of a traceback."""

MAX_TRACEBACK_LINES = 24, 200
"""Where there are many diagnoses, and where there are few. What is cut is cut from the middle: the last lines
name the error, the first ones the way in."""
_COMMA = re.compile(r"(?<=\d,)(?=\d)")
MANY = 4
"""More diagnoses, or exceptions, than these are many."""


@dataclass(frozen=True, slots=True)
class Line:
    """One paragraph of the report; it wraps under its own text, code (`whole`) does not."""

    text: str
    indent: int = 2
    hang: int = 2
    style: str = ""
    whole: bool = False

    def wrapped(self, width: int) -> Iterable[Text]:
        """As it is printed on *width* columns."""
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
    """Breaks a list of ranks, which has no spaces, where a line cannot hold it; no other word."""

    def _split(self, text: str) -> list[str]:
        longest = self.width - len(self.subsequent_indent)
        parts: list[str] = []
        for word in super()._split(text):
            parts += [word] if len(word) <= longest else _COMMA.split(word)
        return parts


def most_lines(number: int) -> int:
    """Lines of the traceback of each of *number* diagnoses or exceptions."""
    return MAX_TRACEBACK_LINES[0] if number > MANY else MAX_TRACEBACK_LINES[1]


def shortened(lines: Sequence[str], most: int, where: str = "--report FILE has them") -> list[str]:
    """*lines* without those in the middle that are too many, and what is longer than anybody reads cut."""
    kept = [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..." for line in lines]
    if len(kept) <= most:
        return kept
    first = most // 3
    return [*kept[:first], f"... ({len(kept) - most + 1} more lines; {where})", *kept[first - most + 1 :]]
