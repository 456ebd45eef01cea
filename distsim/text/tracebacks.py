"""Formats exceptions safely, and groups tracebacks that differ only in numbers.

An exception's `__str__` may raise, return endless text, or contain characters that no file can hold. Tracebacks that
differ only in the numbers of their messages (`bad batch of rank 3: loss 1.11`) are shown once.
"""

from __future__ import annotations

import re
import traceback

LONGEST_LINE = 2_000
LONGEST = 20_000
"""Maximum number of characters of a message or traceback; a mark shows that something was cut."""
MOST_ORIGINS, LONGEST_ORIGINS = 50, 8_000
_NUMBER = re.compile(r"0x[0-9a-f]+|[-+]?\d+(\.\d+)?(e[-+]?\d+)?", re.IGNORECASE)
_BEGIN = "Traceback (most recent call last):"
_FRAME = re.compile(r'[\s|]*File ".*", line \d')
"""Pattern of a frame, also inside a message that contains the traceback of a DataLoader worker.

Frames at different lines belong to different failures.
"""


def message(error: BaseException) -> str:
    """Return `str(error)`; if that raises, Python's substitute text."""
    try:
        text = str(error)
    except RecursionError:
        return "<exception str() recursed without an end>"
    except BaseException:
        return "<exception str() failed>"
    return printable(text)


def error_line(error: BaseException) -> str:
    """Return an exception in one line, such as `ValueError: no such file`."""
    return f"{type(error).__name__}: {message(error)}"


def last_line(error: BaseException) -> str:
    """Return the last line of a traceback: the exception's type with module, and the last line of its message."""
    try:
        text = traceback.format_exception_only(error)[-1].strip()
    except Exception:
        text = error_line(error)
    return printable(text)[:LONGEST_LINE]


def origins(error: BaseException) -> str | None:
    """Return the last lines of *error* and of all that it was raised from, or while handling, also of what `from
    None` keeps out of its traceback; None if they are too many.
    """
    todo: list[BaseException | None] = [error]
    seen: dict[int, BaseException] = {}
    try:
        while todo:
            one = todo.pop()
            if one is not None and id(one) not in seen:
                seen[id(one)] = one
                todo += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    except Exception:  # an exception may be any object
        return None
    text = "\n".join(map(last_line, seen.values())) if len(seen) <= MOST_ORIGINS else ""
    return text if 0 < len(text) <= LONGEST_ORIGINS else None


def error_traceback(shown: traceback.TracebackException | BaseException) -> str:
    """Return a whole traceback as Python prints it; only its last line if it cannot be formatted."""
    try:
        if isinstance(shown, BaseException):
            shown = traceback.TracebackException.from_exception(shown)
        return printable("".join(shown.format()))
    except Exception:  # an exception may be any object: `__cause__`, `__notes__`, a message that is none
        return f"{error_line(shown)}\n" if isinstance(shown, BaseException) else "<a traceback that cannot be shown>\n"


def printable(text: str) -> str:
    """Return text that every file can hold (no lone surrogates), and of a bearable length: its beginning and its
    end.
    """
    if len(text) > LONGEST:
        cut = len(text) - LONGEST
        text = f"{text[: LONGEST // 2]}\n... ({cut:,} more letters) ...\n{text[-LONGEST // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def but_for_numbers(traceback: str) -> str:
    """Return *traceback* with `#` in place of each number in its messages; files, lines and source code are
    unchanged.
    """
    lines, in_message = [], False
    for line in traceback.rstrip().splitlines():
        if line.startswith(_BEGIN):
            in_message = False
        elif line[:1].strip():  # frames are indented; the first line that is not begins the message
            in_message = True
        lines.append(_NUMBER.sub("#", line) if in_message and not _FRAME.match(line) else line)
    return "\n".join(lines)


def others_differ(num: int) -> str:
    """Return `one more that differs in numbers` or `15 more that differ in numbers`."""
    return f"{'one more that differs' if num == 1 else f'{num} more that differ'} in numbers"


def first_difference(first: str, other: str) -> str:
    """Return the first line of *other* that differs from *first*, a similar traceback."""
    lines = other.rstrip().splitlines()
    pairs = zip(first.splitlines(), lines, strict=False)
    return next((line for one, line in pairs if one != line), lines[-1] if lines else "").strip()
