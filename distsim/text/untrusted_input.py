"""Reads files and texts from untrusted sources: with size limits, and shown without escape codes.

All code that reads a file which a user names does so here, so that a pipe cannot block it, `/dev/zero` cannot fill
the memory, and nesting cannot overflow the stack. All code that prints text from such a file prints
`printable(text)`. Types of values are checked, because `str()` and `int()` of an unexpected value may run for ever,
fill the memory or misrepresent the file.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import reprlib
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "MOST_RANKS",
    "brief",
    "folded",
    "load_json",
    "load_toml",
    "number",
    "open_regular",
    "printable",
    "rank_list",
    "read_bytes",
    "text",
    "whole",
    "wholes",
    "within",
    "wrong",
]

MOST_COMPLAINTS = 10
DEEPEST = 100
"""Levels of a JSON document; files of ours have under ten."""

# C0 and C1 controls but for tab and newline, DEL, line and paragraph separators, bidirectional overrides and marks,
# the invisible tag letters, and halves of surrogate pairs, which no terminal can print.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
MOST_RANKS = 1 << 18
"""Maximum rank or job size in a file; larger values mean that the file is damaged. This is twice the size of the
largest existing jobs.
"""
MOST = (1 << 63) - 1
LONGEST = 4096
"""Letters of a name; longer ones are cut."""


def printable(text: str) -> str:
    """Return *text* with every character that a terminal would interpret (control and escape codes) replaced by a
    backslash escape.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Return a regular file, for reading; an OSError, with a plain `strerror`, for a pipe, a device, a folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError:  # a NUL, or half a surrogate pair, in the name
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the content of a regular file of at most *most* bytes; an OSError for all else."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is longer than {most >> 20} MiB", str(path))
    return data


def load_json(text: str | bytes) -> Any:
    """Parse like `json.loads`, but raise ValueError for any fault, including nesting, numbers and constants beyond
    bounds."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _shallow(value)
    return value


def _shallow(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inside(outer)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def load_toml(text: str) -> dict[str, Any]:
    """Parse like `tomllib.loads`, but raise ValueError with one line for any fault."""
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(brief(str(error), 300)) from None
    _shallow(value)
    return value


def brief(value: object, most: int = 80) -> str:
    """Return a value for a message: in one line, and short however long or deep it is."""
    if isinstance(value, str) and len(value) <= most:
        return printable(value)
    if isinstance(value, str):
        return f"{printable(value[: most - 3])}..."
    if isinstance(value, int) and abs(value) >= 1 << 200:
        return "a number of more than 60 digits"
    return printable(_SHORT.repr(value))


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 80, 80, 60


def _inside(value: dict[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def within(path: str, roots: list[Path]) -> Path | None:
    """Return the real path of *path* if it is under one of *roots* after links are followed."""
    try:
        real = Path(path).resolve()
        return real if any(real.is_relative_to(root.resolve()) for root in roots) else None
    except (OSError, ValueError, RuntimeError):  # a NUL in it, too long, links in a circle
        return None


def folded(lines: list[str], most: int = MOST_COMPLAINTS) -> list[str]:
    """Return the first *most* of *lines*, and how many more there are."""
    return [*lines[:most], f"... and {len(lines) - most} more"] if len(lines) > most else list(lines)


def wrong(value: object, where: str, expected: str) -> ValueError:
    """Return the complaint about one value."""
    shown = f"{value!r}"[:60] if isinstance(value, str | int | float | bool) or value is None else "no such thing"
    kind = type(value).__name__
    return ValueError(printable(f"{where}: expected {expected}, got {shown} ({kind})"))


def whole(value: object, where: str, least: int = 0, most: int = MOST) -> int:
    """Return a whole number within bounds, also one that JSON dumps write as text; ValueError for all else."""
    if isinstance(value, str) and len(value) < 20 and re.fullmatch(r"-?\d+", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        if isinstance(value, int) and abs(value) > MOST:  # its digits may be more than Python prints
            raise ValueError(f"{where}: expected a whole number from {least} to {most}, got a larger one")
        raise wrong(value, where, "a whole number" + (f" from {least} to {most}" if isinstance(value, int) else ""))
    return value


def number(value: object, where: str) -> float:
    """Return a finite number; ValueError for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST or math.isnan(value):
        raise wrong(value, where, "a number")
    return float(value)


def text(value: object, where: str, longest: int = LONGEST) -> str:
    """Return a text that a terminal shows and does not obey; whole numbers are taken as their digits."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST:
        return str(value)
    if not isinstance(value, str):
        raise wrong(value, where, "a text")
    return printable(value if len(value) <= longest else f"{value[:longest]}...")


def wholes(
    value: object, where: str, least: int = -MOST, most: int = MOST, longest: int = MOST_RANKS
) -> tuple[int, ...]:
    """Return a list of whole numbers."""
    if not isinstance(value, list | tuple) or len(value) > longest:
        raise wrong(value, where, "a list of whole numbers")
    return tuple([whole(one, f"{where}[{i}]", least, most) for i, one in enumerate(value)])


def rank_list(value: object, where: str) -> tuple[int, ...]:
    """Return a list of ranks, or its text (`"[0, 1]"`)."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = re.findall(r"\d+", value)
    return wholes(value, where, 0, MOST_RANKS - 1)
