"""Who is right when ranks disagree: the majority, else the side of the lowest rank."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Vote", "blame_conflicts", "majority"]


@dataclass(frozen=True, slots=True)
class Vote:
    """Ranks that agree, ranks that do not, and whether that was decided by numbers at all."""

    reference: tuple[int, ...]
    culprits: tuple[int, ...]
    tie: bool


def majority(values: Mapping[int, Hashable]) -> Vote:
    """The largest side is the reference. *values* are in group-rank order.

    Two sides of equal size are a tie: the one with the lowest group rank is the reference then,
    and `Vote.tie` says that nothing but convention decided.
    """
    sides: dict[Hashable, list[int]] = {}
    for rank, value in values.items():
        sides.setdefault(value, []).append(rank)
    largest = max(len(side) for side in sides.values())
    leaders = [value for value, side in sides.items() if len(side) == largest]
    reference = sides[leaders[0]]
    culprits = tuple(sorted(rank for value, side in sides.items() if value != leaders[0] for rank in side))
    return Vote(tuple(reference), culprits, tie=len(leaders) > 1)


def blame_conflicts(
    ranks: Sequence[int],
    conflicts: Sequence[tuple[int, int]],
    innocent: int | None = None,
    odd: Collection[int] = (),
) -> Vote:
    """The fewest ranks whose removal leaves no two that contradict each other (greedily).

    Of two that contradict each other equally often, the *odd* one is blamed.

    A rank that contradicts itself is always one of them. *innocent* (a root whose list is the
    reference) is blamed only if it contradicts at least half of the others.
    """
    left = list(dict.fromkeys(conflicts))
    culprits: list[int] = []
    tie = False
    while left:
        counts = dict.fromkeys(ranks, 0)
        for a, b in left:
            counts[a] += 1
            if a != b:
                counts[b] += 1
            else:
                counts[a] += len(ranks)
        if innocent is not None and counts.get(innocent, 0) * 2 <= len(ranks):
            counts[innocent] = 0
        most = max(counts.values())
        leaders = [rank for rank in ranks if counts[rank] == most]
        leaders = [rank for rank in leaders if rank in odd] or leaders
        tie = tie or any(a != b and a in leaders and b in leaders for a, b in left)
        worst = leaders[-1]
        culprits.append(worst)
        left = [pair for pair in left if worst not in pair]
    return Vote(tuple(r for r in ranks if r not in culprits), tuple(sorted(culprits)), tie)
