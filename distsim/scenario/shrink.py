"""The one shrinker: what of a failing thing can be left out, so that it still fails alike.

Delta debugging (Zeller & Hildebrandt, "Simplifying and isolating failure-inducing input", 2002): larger pieces
first, then smaller ones, until no single part can go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["shrink"]

Part = TypeVar("Part")


def shrink(parts: Sequence[Part], fails: Callable[[list[Part]], bool], *, singly: bool = False) -> list[Part]:
    """Remove *parts* one by one while *fails* stays true, and return the rest in order.

    *parts* as they are must fail; *fails* is asked of smaller lists only, and the last list of which it was true is
    the answer. It leaves out halves, quarters and so on down to single parts, and these until a round finds none;
    *singly*: each part once, by itself (for a few that have little to do with each other).
    """
    kept = list(parts)
    size = 1 if singly else max(1, len(kept) // 2)
    while kept:
        at, before = 0, len(kept)
        while at < len(kept):
            fewer = kept[:at] + kept[at + size :]
            if fails(fewer):
                kept = fewer
            else:
                at += size
        if size == 1 and (singly or len(kept) == before):
            break
        size = max(1, size // 2)
    return kept
