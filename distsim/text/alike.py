"""Tracebacks that are the same but for the numbers in their messages: `bad batch of rank 3: loss 1.11`."""

from __future__ import annotations

import re

__all__ = ["but_for_numbers", "last_words"]

_NUMBER = re.compile(r"0x[0-9a-f]+|[-+]?\d+(\.\d+)?(e[-+]?\d+)?", re.IGNORECASE)
_BEGIN = "Traceback (most recent call last):"


def but_for_numbers(traceback: str) -> str:
    """*traceback* with a `#` for each number of its messages; its files, lines and source stay as they are."""
    lines, in_message = [], False
    for line in traceback.rstrip().splitlines():
        if line.startswith(_BEGIN):
            in_message = False
        elif line[:1].strip():  # frames are indented; the first line that is not begins the message
            in_message = True
        lines.append(_NUMBER.sub("#", line) if in_message else line)
    return "\n".join(lines)


def last_words(traceback: str) -> str:
    """The line that names the error: the first one after the last frame."""
    last = traceback.rstrip().rpartition(_BEGIN)[2]
    return next((line for line in last.splitlines() if line[:1].strip()), "").strip()
