"""Reads files and texts from untrusted sources: with size limits, and shown without escape codes.

All code that reads a file which a user names does so here, so that a pipe cannot block it, `/dev/zero` cannot fill
the memory, and nesting cannot overflow the stack. All code that prints text from such a file prints
`printable(text)`. Types of values are checked, because `str()` and `int()` of an unexpected value may run for ever,
fill the memory or misrepresent the file.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import reprlib
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

from distsim.errors import UsageError

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
LARGEST_SOURCE = 16 << 20
"""Bytes of a program's file, and of other files that a person may have written."""
LARGEST_DOCUMENT = 64 << 20
"""Bytes of a report, with every rank of the largest job."""
LONGEST_LINE = 1000


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


def read_text(path: str | os.PathLike[str], most: int = LARGEST_SOURCE) -> str:
    """Return the UTF-8 text of a regular file of at most *most* bytes; an OSError for all else.

    Bytes that are not UTF-8 become question marks.
    """
    return read_bytes(path, most).decode(errors="replace")


def source_line(path: str, number: int) -> str:
    """Return line *number* of a source file; empty if there is none, or if the file cannot be read."""
    return "".join(_source_lines(path)[number - 1 : number])


@functools.lru_cache(maxsize=64)
def _source_lines(path: str) -> list[str]:
    try:
        return [line.rstrip() for line in read_text(path).splitlines()]
    except OSError:
        return []


def read_json(path: str | os.PathLike[str], most: int = LARGEST_DOCUMENT) -> Any:
    """Return the JSON value in a regular file of at most *most* bytes; OSError or ValueError for all else."""
    return load_json(read_bytes(path, most))


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    try:
        return dict(read_json(path))
    except (OSError, ValueError):
        return {}


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


def toml_value(text: str) -> int | float | bool | str:
    """Return the number or boolean that *text* is in TOML, else *text*."""
    try:
        value = load_toml(f"x = {text}")["x"]
    except ValueError:
        return text
    return value if isinstance(value, int | float | bool | str) else text


def brief(value: object, most: int = 80) -> str:
    """Return a value for a message: in one line, and short however long or deep it is."""
    if isinstance(value, str) and len(value) <= most:
        return printable(value)
    if isinstance(value, str):
        return f"{printable(value[: most - 3])}..."
    if isinstance(value, int) and abs(value) >= 1 << 200:
        return "a number of more than 60 digits"
    return printable(_SHORT.repr(value))


def shortened(text: str) -> str:
    """Return *text* with its long lines cut."""
    return "\n".join(
        line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}... (cut)" for line in text.split("\n")
    )


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


def faulty(where: object, faults: list[str]) -> UsageError:
    """Return the error that lists what is wrong with the file *where*, one line each."""
    if len(faults) == 1:
        return UsageError(f"{where}: {faults[0]}")
    return UsageError("\n".join([f"{where}: {len(faults)} faults", *(f"  {fault}" for fault in folded(faults))]))


def digits(text: str) -> int | None:
    """Return the whole number that *text* writes in at most 18 decimal digits, else None."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
