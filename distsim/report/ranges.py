"""Ranks as people write them: `0-2,4-63`."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["rank_ranges", "ranks_phrase"]


def rank_ranges(ranks: Iterable[int]) -> str:
    """Runs of neighbours joined: `[0, 1, 2, 5]` is `"0-2,5"`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranks_phrase(ranks: Iterable[int]) -> str:
    """`"rank 3"` or `"ranks 0-2,5"`."""
    ranks = sorted(set(ranks))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {rank_ranges(ranks)}"
