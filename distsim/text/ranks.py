"""Formats many ranks in few words."""

from __future__ import annotations

from collections.abc import Iterable

FEW_RUNS = 8
"""Maximum number of ranges in a line that also has other content."""


def ranges_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last number of each run of consecutive *numbers*, in ascending order."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        begins = not ranges or number > ranges[-1][1] + 1
        ranges.append((number if begins else ranges.pop()[0], number))
    return ranges


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as `0-2,4-63`; two consecutive ranks are written `0,1`."""
    return ",".join(
        str(first) if first == last else f"{first}{'-' if last - first > 1 else ','}{last}"
        for first, last in ranges_of(ranks)
    )


def of_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3`, `ranks 1,2` or `ranks 0-7`."""
    runs = format_ranks(ranks)
    return f"rank{'' if runs.isdecimal() else 's'} {runs}"


def some_ranks(ranks: Iterable[int]) -> str:
    """Return `ranks 0,2,4,6 and 16 more` if the whole list is elsewhere; a few ranks like `of_ranks`."""
    listed = sorted(set(ranks))
    runs = format_ranks(listed).split(",")
    if len(runs) <= FEW_RUNS:
        return of_ranks(listed)
    first = ",".join(runs[: FEW_RUNS // 2])
    last = int(runs[FEW_RUNS // 2 - 1].rpartition("-")[2])
    return f"ranks {first} and {sum(rank > last for rank in listed)} more"
