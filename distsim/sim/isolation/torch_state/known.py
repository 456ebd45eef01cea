"""Which modules and classes were looked at already."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

__all__ = ["Known"]


class Known:
    """Modules and classes that were seen, without keeping them. The number of one that is gone (`id`) may be given to
    another."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, thing: Any) -> bool:
        seen = self._seen.get(id(thing))
        return seen is not None and seen() is thing

    def others(self, things: Sequence[Any]) -> list[Any]:
        """Those of *things* that were not added."""
        seen = self._seen
        return [thing for thing in things if (known := seen.get(id(thing))) is None or known() is not thing]

    def add(self, thing: Any) -> None:
        self._seen[id(thing)] = weakref.ref(thing)
