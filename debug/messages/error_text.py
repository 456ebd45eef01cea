"""The words of an exception, whatever it is: one whose `__str__` raises, that is endless, or that no file can hold."""

from __future__ import annotations

import traceback

__all__ = ["error_line", "error_traceback", "last_line", "message", "origins", "printable"]

LONGEST_LINE = 2_000
LONGEST = 20_000
"""Letters of a message, or a traceback, that are kept: a report is read by people. What is cut is said."""
MOST_ORIGINS, LONGEST_ORIGINS = 50, 8_000


def message(error: BaseException) -> str:
    """`str(error)`; where that raises, Python's own words for it."""
    try:
        text = str(error)
    except RecursionError:
        return "<exception str() recursed without an end>"
    except BaseException:
        return "<exception str() failed>"
    return printable(text)


def error_line(error: BaseException) -> str:
    """`ValueError: no such file`."""
    return f"{type(error).__name__}: {message(error)}"


def last_line(error: BaseException) -> str:
    """As the last line of a traceback: with the module of the exception's type, and only the last of many lines."""
    try:
        text = traceback.format_exception_only(error)[-1].strip()
    except Exception:
        text = error_line(error)
    return printable(text)[:LONGEST_LINE]


def origins(error: BaseException) -> str | None:
    """The last lines of *error* and of all that it was raised from, or while handling, also of what `from None` keeps
    out of its traceback; None where they are too many."""
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
    """A whole traceback as Python prints it; where it cannot be made, its last line."""
    try:
        if isinstance(shown, BaseException):
            shown = traceback.TracebackException.from_exception(shown)
        return printable("".join(shown.format()))
    except Exception:  # an exception may be any object: `__cause__`, `__notes__`, a message that is none
        return f"{error_line(shown)}\n" if isinstance(shown, BaseException) else "<a traceback that cannot be shown>\n"


def printable(text: str) -> str:
    """Text that every file can hold (no lone surrogates), and of a bearable length: its beginning and its end."""
    if len(text) > LONGEST:
        cut = len(text) - LONGEST
        text = f"{text[: LONGEST // 2]}\n... ({cut:,} more letters) ...\n{text[-LONGEST // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
