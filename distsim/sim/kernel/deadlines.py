"""When what somebody waits for is given up."""

from __future__ import annotations

import heapq
import itertools
from typing import Protocol

__all__ = ["Deadline", "Deadlines", "Due"]


class Due(Protocol):
    """What happens at a deadline (scheduler side)."""

    explicit: bool
    """The program set the limit: it comes where nothing else can happen any more, too."""

    @property
    def over(self) -> bool:
        """Whether it need not come any more. Asked before time passes for its sake; it is not asked again."""
        ...

    def strike(self) -> None:
        """Its moment has come."""
        ...


Deadline = tuple[float, int, Due]
"""Seconds (virtual), the order among equal times, and what happens then."""


class Deadlines:
    """Those to come. Kept out of simpy's heap: a pending timeout must not hide a deadlock."""

    def __init__(self) -> None:
        self._heap: list[Deadline] = []
        self._count = itertools.count()

    def add(self, at_s: float, due: Due) -> None:
        heapq.heappush(self._heap, (at_s, next(self._count), due))

    def next(self) -> Deadline | None:
        """The first that is not over."""
        heap = self._heap
        while heap and heap[0][2].over:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def take(self) -> Deadline:
        """The first, which is not to come any more."""
        return heapq.heappop(self._heap)

    def take_explicit(self) -> Deadline | None:
        """Where nothing else can happen any more, only a limit that the program set itself ends a wait."""
        coming = [deadline for deadline in self._heap if not deadline[2].over]
        explicit = min((deadline for deadline in coming if deadline[2].explicit), default=None)
        if explicit is not None:
            coming.remove(explicit)
        heapq.heapify(coming)
        self._heap = coming
        return explicit
