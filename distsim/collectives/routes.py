"""Routes of many transfers as one array of links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["Routes", "joined"]


@dataclass(frozen=True)
class Routes:
    """*rows* are links in order, -1 in places that a way does not need."""

    rows: NDArray[np.int64]

    @cached_property
    def _there(self) -> NDArray[np.bool_]:
        there: NDArray[np.bool_] = self.rows >= 0
        return there

    @cached_property
    def flat(self) -> NDArray[np.int64]:
        """All links, way after way."""
        return self.rows[self._there]

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Links of each way."""
        counts: NDArray[np.int64] = self._there.sum(axis=1)
        return counts

    def links(self, place: int) -> tuple[int, ...]:
        """The links of one way."""
        return tuple(self.rows[place][self._there[place]].tolist())

    def total(self, per_link: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the links of each way have together, link after link."""
        total = np.zeros(len(self.rows))
        for column, there in zip(self.rows.T, self._there.T, strict=True):
            total += np.where(there, per_link[column], 0.0)
        return total

    def largest(self, per_link: NDArray[np.float64]) -> NDArray[np.float64]:
        """The most that a link of each way has, 0 for a way of no links."""
        if not self.rows.shape[1]:
            return np.zeros(len(self.rows))
        most: NDArray[np.float64] = np.where(self._there, per_link[self.rows], 0.0).max(axis=1)
        return most


def joined(every: Sequence[Routes]) -> Routes:
    """The ways of one after those of another."""
    width = max(ways.rows.shape[1] for ways in every)
    if all(ways.rows.shape[1] == width for ways in every):
        return Routes(np.concatenate([ways.rows for ways in every]))
    rows = np.full((sum(len(ways.rows) for ways in every), width), -1, dtype=np.int64)
    first = 0
    for ways in every:
        count, columns = ways.rows.shape
        rows[first : first + count, :columns] = ways.rows
        first += count
    return Routes(rows)
