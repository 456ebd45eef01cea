"""Attributes that are replaced during a simulation: computed once per process, and exchanged all at once.

A test of four ranks takes milliseconds, and there are hundreds of attributes: checking that the replacements are
still valid, installing them and removing them therefore avoids a Python step for each.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import call, is_, setitem
from types import CellType, FunctionType, ModuleType
from typing import Any

from distsim.sim.isolation.modules.aliases import ALIASES
from distsim.sim.isolation.wraps import resembling
from distsim.torch_compat.compiler import GET_BUILTIN_TABLE

_get_builtin_table = GET_BUILTIN_TABLE.get()

Patch = tuple[Any, str, Any]
"""Holder, attribute, replacement."""
MISSING = object()


def attribute_of(holder: Any, name: str) -> Any:
    """Return the attribute as it is in *holder* itself, including descriptors."""
    return _reader(holder)(name, MISSING)


def _reader(holder: Any) -> Callable[[str, Any], Any]:
    if isinstance(holder, FunctionType | CellType):  # __defaults__, what a decorator is around
        return lambda name, _: getattr(holder, name)
    reader: Callable[[str, Any], Any] = vars(holder).get
    return reader


class PatchTable:
    """Patches that are independent of the single simulation.

    They are made once, and again if an original has changed, or if modules were added or have bound another name.
    """

    def __init__(self, *makers: Callable[[], list[Patch]]) -> None:
        self._makers = makers
        self._changes = -1
        self.patches: list[Patch] = []
        self._real: list[Any] = []
        self._names: list[str] = []
        self._readers: list[Callable[[str, Any], Any]] = []
        self._in_modules: tuple[list[dict[str, Any]], list[str], list[Any], list[Any]] = [], [], [], []
        """For patches in modules: the modules' dictionaries, names, replacements and originals."""
        self._new_in_modules: tuple[list[dict[str, Any]], list[str], list[Any], list[Any]] = [], [], [], []
        """Patches in modules that replace nothing."""
        self._others: list[tuple[Any, str, Any, Any]] = []
        self._operators: dict[int, str] = {}
        self._known_operators = -1
        self._is_put = False

    def look(self) -> list[Patch]:
        """Return the valid patches at the start of a simulation."""
        ALIASES.look()
        if self._changes != ALIASES.changes or not self._are_real():
            self._make()
        return self.patches

    def _are_real(self) -> bool:
        """Return whether the originals of all patches are unchanged."""
        return all(map(is_, map(call, self._readers, self._names, repeat(MISSING)), self._real))

    def put(self, *renewals: Callable[[], None]) -> None:
        """Apply the patches after `look`. *renewals* replace values that some patches put there."""
        self._is_put = True
        for spaces, names, replacements, _ in (self._in_modules, self._new_in_modules):
            _exhaust(map(setitem, spaces, names, replacements))
        for holder, name, replacement, _ in self._others:
            setattr(holder, name, replacement)
        for renew in renewals:
            renew()
        self._tell_compiler()

    def take_away(self) -> None:
        """Restore everything that was patched, even if not all patches were applied."""
        if not self._is_put:
            return
        self._is_put = False
        known = _get_builtin_table()
        for number in self._operators:
            known.pop(number, None)
        spaces, names, _, real = self._in_modules
        _exhaust(map(setitem, spaces, names, real))
        spaces, names, _, nothing = self._new_in_modules
        _exhaust(map(dict.pop, spaces, names, nothing))
        for holder, name, _, value in self._others:
            if value is not MISSING:
                setattr(holder, name, value)
            else:
                with contextlib.suppress(AttributeError):
                    delattr(holder, name)

    def _make(self) -> None:
        entries = {
            (id(holder), name): (holder, name, value) for maker in self._makers for holder, name, value in maker()
        }
        self._names = [name for _, name, _ in entries.values()]
        self._readers = [_reader(holder) for holder, _, _ in entries.values()]
        self._real = [*map(call, self._readers, self._names, repeat(MISSING))]
        self.patches = [
            (holder, name, resembling(real, value))
            for (holder, name, value), real in zip(entries.values(), self._real, strict=True)
        ]
        self._in_modules, self._new_in_modules, self._others = ([], [], [], []), ([], [], [], []), []
        for (holder, name, value), real in zip(self.patches, self._real, strict=True):
            if type(holder) is ModuleType:
                columns = self._new_in_modules if real is MISSING else self._in_modules
                columns[0].append(vars(holder))
                columns[1].append(name)
                columns[2].append(value)
                columns[3].append(real)
            else:
                self._others.append((holder, name, value, real))
        self._changes, self._known_operators = ALIASES.changes, -1

    def _tell_compiler(self) -> None:
        """Register replacements with TorchScript, which knows some of torch's functions (torch.save) as operators."""
        known = _get_builtin_table()
        if self._known_operators != len(known):
            self._known_operators = len(known)
            pairs = zip(self._real, self.patches, strict=True)
            self._operators = {id(ours): known[id(real)] for real, (_, _, ours) in pairs if id(real) in known}
        known.update(self._operators)


def _exhaust(steps: Iterable[Any]) -> None:
    deque(steps, maxlen=0)
