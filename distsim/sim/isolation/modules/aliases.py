"""Finds modules that bound a patched function to their own name: `from time import sleep`.

A simulation patches such names, too. There are about a thousand modules, and most never change: each is searched
once per process, and again if it has grown or was imported anew. The user's modules, in which tests exchange names,
are searched every time. The check that nothing has changed runs before every simulation, so it avoids a Python step
per module.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from distsim.sim.isolation.modules.modules import is_own_file

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
    """Modules that have bound one of *names*."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._seen: dict[str, tuple[weakref.ref[Any], int]] = {}
        """Name of a module -> the module, and how many names it had."""
        self._holding: dict[str, tuple[str, ...]] = {}
        """Names that each module had bound."""
        self._listed: list[str] = []
        self._there: list[Callable[[], Any]] = []
        self._spaces: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        """State of `sys.modules` at the last search: the names and modules, and the number of names in each module that
        is not searched every time."""
        self._own: list[str] = []
        """Modules that are searched every time."""
        self._meanings: list[Callable[[], Any]] = []
        """Objects to which the names were bound."""
        self.changes = 0
        """Number of searches that found something new."""

    def also(self, *names: str) -> None:
        """Search for these objects, too, from now on."""
        self._names += names
        self._seen.clear()
        self._listed.clear()

    def look(self) -> None:
        """Search new modules at the start of a simulation."""
        if not self._is_as_it_was():
            self._look_everywhere()
            self._means_what_it_did()
            return
        before = [self._holding.get(name) for name in self._own]
        for name in self._own:
            self._look_through(name, sys.modules[name])
        is_the_same = before == [self._holding.get(name) for name in self._own]
        self.changes += not self._means_what_it_did() or not is_the_same

    def _look_everywhere(self) -> None:
        self.changes += 1
        seen, modules = self._seen, sys.modules.copy()
        for name, module in modules.items():
            last = seen.get(name)
            if last is None or last[0]() is not module or last[1] != len(module.__dict__):
                self._look_through(name, module)
        for name in self._holding.keys() - modules.keys():
            del self._holding[name]
        self._own = [name for name in modules if name not in seen]
        self._listed, self._there = list(modules), [_reference(module) for module in modules.values()]
        self._spaces = [vars(modules[name]) for name in seen if name in modules]
        self._sizes = list(map(len, self._spaces))

    def _is_as_it_was(self) -> bool:
        """Return whether `sys.modules` is unchanged and no module has grown."""
        return (
            self._listed == list(sys.modules)
            and all(map(operator.is_, map(operator.call, self._there), list(sys.modules.values())))
            and self._sizes == list(map(len, self._spaces))
        )

    def _means_what_it_did(self) -> bool:
        """Return whether the names still have their original meaning, because a test may have replaced a module's
        `sleep`."""
        current = [
            getattr(sys.modules.get(m), "__dict__", {}).get(n) for m, held in self._holding.items() for n in held
        ]
        if len(current) == len(self._meanings) and all(map(operator.is_, map(operator.call, self._meanings), current)):
            return True
        self._meanings = [*map(_reference, current)]
        return False

    def of(self, *names: str) -> Iterator[tuple[str, Any, str, Any]]:
        """Yield (module name, module, one of *names*, its value in the module)."""
        wanted = frozenset(names)
        for module_name, held in self._holding.items():
            module = sys.modules.get(module_name)
            if module is not None:
                space = module.__dict__
                yield from ((module_name, module, n, space[n]) for n in held if n in wanted and n in space)

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


def _reference(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


ALIASES = _Aliases((*CLOCKS, "getpid", "wait"))
