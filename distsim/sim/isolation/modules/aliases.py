"""Modules that took their own name for a function: `from time import sleep`, `from os import getpid`.

A simulation leads such names elsewhere, too. There are some thousand modules, and most never change: each is looked
through once a process, and again where it has grown, or was imported anew. The user's own, whose names tests
exchange, are looked through every time.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from distsim.sim.isolation.modules.modules import is_own_file

__all__ = ["ALIASES", "CLOCKS"]

CLOCKS = (
    "time",
    "_time",
    "sleep",
    "_sleep",
    "perf_counter",
    "monotonic",
    "time_ns",
    "perf_counter_ns",
    "monotonic_ns",
    "timer",
    "process_time",
)


class _Aliases:
    """Which modules have a name out of *names*."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._seen: dict[str, tuple[weakref.ref[Any], int]] = {}
        """Name of a module -> the module, and how many names it had."""
        self._holding: dict[str, tuple[str, ...]] = {}
        """Which of our names it had."""

    def look(self) -> None:
        """A simulation begins: look through what is new."""
        seen = self._seen
        for name, module in sys.modules.copy().items():
            last = seen.get(name)
            if last is None or last[0]() is not module or last[1] != len(module.__dict__):
                self._look_through(name, module)

    def of(self, *names: str) -> Iterator[tuple[str, Any, str, Any]]:
        """Name of a module, the module, one of *names*, and what it means there."""
        for module_name, held in self._holding.items():
            module = sys.modules.get(module_name)
            if module is not None:
                space = module.__dict__
                yield from ((module_name, module, n, space[n]) for n in held if n in names and n in space)

    def _look_through(self, name: str, module: Any) -> None:
        self._seen.pop(name, None)
        self._holding.pop(name, None)
        space = getattr(module, "__dict__", None)
        if space is None:
            return
        held = tuple(alias for alias in self._names if alias in space)
        if held:
            self._holding[name] = held
        if isinstance(module, ModuleType) and not is_own_file(space.get("__file__")):
            self._seen[name] = weakref.ref(module), len(space)


ALIASES = _Aliases((*CLOCKS, "getpid", "wait"))
