"""Calls that do not look alike, from the moment a comparer suspects them until the records of all members were seen.

A comparer suspects a pair of fingerprints once. The records behind it may be on hosts whose monitors have not met
yet, or that are late with their answer: until whoever judges has had them, the suspicion is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from distsim.debug.matching.comparer import GroupKey, Suspicion

__all__ = ["Suspicions"]

SETTLE_S = 0.25
"""Whether two lines were swapped is known only when both have been reached by all."""
AGAIN_S = 0.5
MOST_LOOKS = 20
"""How often a call is looked at whose members' hosts do not answer: ten seconds, and they count as cut off."""
MOST = 4096
"""Beyond it the first are kept: what comes later follows from them."""


@dataclass
class _Held:
    first: Suspicion
    """Of the group's suspected calls the earliest."""
    due: float
    looks: int = 0


class Suspicions:
    """Those of one monitor; of each group the earliest call, of each message itself."""

    def __init__(self) -> None:
        self._held: dict[GroupKey, _Held] = {}

    def add(self, found: Iterable[Suspicion], now: float) -> None:
        """Take what a comparer suspects, here or on another host."""
        for suspicion in found:
            due = now + SETTLE_S if suspicion.lines_only else now
            held = self._held.get(suspicion.key)
            if held is not None:
                held.due = min(held.due, due)
                if suspicion.seq < held.first.seq:
                    held.first = suspicion
            elif len(self._held) < MOST:
                self._held[suspicion.key] = _Held(suspicion, due)

    def hand_over(self) -> list[Suspicion]:
        """All, for the monitor that judges."""
        all_, self._held = [held.first for held in self._held.values()], {}
        return all_

    def due(self, now: float) -> dict[GroupKey, int]:
        """The calls to look at by now, by group or message."""
        return {key: held.first.seq for key, held in self._held.items() if held.due <= now}

    def looked_at(
        self,
        calls: Iterable[GroupKey],
        ranks: Collection[int],
        now: float,
        members: Callable[[GroupKey], Sequence[int]] = itemgetter(1),
    ) -> None:
        """*calls* were held against the records of *ranks*; those with other *members*, too, stay."""
        for key in calls:
            held = self._held.pop(key)
            held.looks += 1
            if held.looks < MOST_LOOKS and not all(rank in ranks for rank in members(key)):
                held.due = now + AGAIN_S
                self._held[key] = held
