"""Shrinks a failing input: removes parts as long as it still fails in the same way.

Delta debugging: larger pieces first, then smaller ones, until no single part can be removed. Source: Zeller and
Hildebrandt, "Simplifying and isolating failure-inducing input", 2002.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Part = TypeVar("Part")


def shrink(parts: Sequence[Part], fails: Callable[[list[Part]], bool], *, singly: bool = False) -> list[Part]:
    """Remove *parts* while *fails* stays true, and return the rest in order.

    All *parts* together must fail; *fails* is called for shorter lists only. Halves are removed first, then quarters
    and so on down to single parts, until a round removes nothing. With *singly*, each part is tried once by itself.
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
