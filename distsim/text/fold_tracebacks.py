"""Tracebacks that are the same but for the numbers in their messages: `bad batch of rank 3: loss 1.11`."""

from __future__ import annotations

import re

__all__ = ["but_for_numbers", "first_difference", "others_differ"]

_NUMBER = re.compile(r"0x[0-9a-f]+|[-+]?\d+(\.\d+)?(e[-+]?\d+)?", re.IGNORECASE)
_BEGIN = "Traceback (most recent call last):"
_FRAME = re.compile(r'[\s|]*File ".*", line \d')
"""A message may hold a traceback, too: that of a DataLoader's worker. Another line is another failure there as well."""


def but_for_numbers(traceback: str) -> str:
    """*traceback* with a `#` for each number of its messages; its files, lines and source stay as they are."""
    lines, in_message = [], False
    for line in traceback.rstrip().splitlines():
        if line.startswith(_BEGIN):
            in_message = False
        elif line[:1].strip():  # frames are indented; the first line that is not begins the message
            in_message = True
        lines.append(_NUMBER.sub("#", line) if in_message and not _FRAME.match(line) else line)
    return "\n".join(lines)


def others_differ(num: int) -> str:
    """`one more that differs in numbers`, `15 more that differ in numbers`."""
    return f"{'one more that differs' if num == 1 else f'{num} more that differ'} in numbers"


def first_difference(first: str, other: str) -> str:
    """The line of *other* that first tells it from *first*, which is alike: of any of its messages, at any line."""
    lines = other.rstrip().splitlines()
    pairs = zip(first.splitlines(), lines, strict=False)
    return next((line for one, line in pairs if one != line), lines[-1] if lines else "").strip()
