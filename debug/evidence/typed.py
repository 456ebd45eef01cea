"""Values out of other people's files, as the types they should have: `str()` and `int()` of a stranger's value may
run for ever, fill the memory or say something else than the file does."""

from __future__ import annotations

import math
import re

from distsim.text.untrusted_input import printable

__all__ = ["MOST_RANKS", "number", "rank_list", "text", "whole", "wholes", "wrong"]

MOST_RANKS = 1 << 18
"""A higher rank, or a larger job, is taken for damage: twice the largest jobs there are."""
MOST = (1 << 63) - 1
LONGEST = 4096
"""Letters of a name; longer ones are cut."""


def wrong(value: object, where: str, expected: str) -> ValueError:
    """The complaint about one value."""
    shown = f"{value!r}"[:60] if isinstance(value, str | int | float | bool) or value is None else "no such thing"
    kind = type(value).__name__
    return ValueError(printable(f"{where}: expected {expected}, got {shown} ({kind})"))


def whole(value: object, where: str, least: int = 0, most: int = MOST) -> int:
    """A whole number within bounds, also one that JSON dumps write as text; ValueError for all else."""
    if isinstance(value, str) and len(value) < 20 and re.fullmatch(r"-?\d+", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        if isinstance(value, int) and abs(value) > MOST:  # its digits may be more than Python prints
            raise ValueError(f"{where}: expected a whole number from {least} to {most}, got a larger one")
        raise wrong(value, where, "a whole number" + (f" from {least} to {most}" if isinstance(value, int) else ""))
    return value


def number(value: object, where: str) -> float:
    """A finite number; ValueError for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST or math.isnan(value):
        raise wrong(value, where, "a number")
    return float(value)


def text(value: object, where: str, longest: int = LONGEST) -> str:
    """A text that a terminal shows and does not obey; whole numbers are taken as their digits."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST:
        return str(value)
    if not isinstance(value, str):
        raise wrong(value, where, "a text")
    return printable(value if len(value) <= longest else f"{value[:longest]}...")


def wholes(
    value: object, where: str, least: int = -MOST, most: int = MOST, longest: int = MOST_RANKS
) -> tuple[int, ...]:
    """A list of whole numbers."""
    if not isinstance(value, list | tuple) or len(value) > longest:
        raise wrong(value, where, "a list of whole numbers")
    return tuple([whole(one, f"{where}[{place}]", least, most) for place, one in enumerate(value)])


def rank_list(value: object, where: str) -> tuple[int, ...]:
    """A list of ranks, or its text (`"[0, 1]"`)."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = re.findall(r"\d+", value)
    return wholes(value, where, 0, MOST_RANKS - 1)
