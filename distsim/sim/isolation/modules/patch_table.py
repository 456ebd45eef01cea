"""Attributes that are led elsewhere while a simulation runs: worked out once a process, exchanged all at once.

A test of four ranks is over in milliseconds, and there are hundreds of attributes: to see that what stands for what
still holds, to put it in place and to take it away is no step of Python's for each.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import call, is_, setitem
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch

from distsim.sim.isolation.modules.aliases import ALIASES
from distsim.sim.isolation.resemblance import resembling

__all__ = ["MISSING", "Patch", "PatchTable", "attribute_of"]

Patch = tuple[Any, str, Any]
"""Holder, attribute, replacement."""
MISSING = object()


def attribute_of(holder: Any, name: str) -> Any:
    """The attribute as it stands in *holder* itself, descriptors included."""
    return _reader(holder)(name, MISSING)


def _reader(holder: Any) -> Callable[[str, Any], Any]:
    if isinstance(holder, FunctionType | CellType):  # __defaults__, what a decorator is around
        return lambda name, _: getattr(holder, name)
    reader: Callable[[str, Any], Any] = vars(holder).get
    return reader


class PatchTable:
    """Patches that know nothing of the simulation they are for: made once, and again where one of the things that they
    stand for is another, or modules have come, or taken another name."""

    def __init__(self, *makers: Callable[[], list[Patch]]) -> None:
        self._makers = makers
        self._changes = -1
        self.patches: list[Patch] = []
        self._real: list[Any] = []
        self._names: list[str] = []
        self._readers: list[Callable[[str, Any], Any]] = []
        self._in_modules: tuple[list[dict[str, Any]], list[str], list[Any], list[Any]] = [], [], [], []
        """Of those that stand in a module: its dictionary, name, replacement, what it stands for."""
        self._new_in_modules: tuple[list[dict[str, Any]], list[str], list[Any], list[Any]] = [], [], [], []
        """Those that stand for nothing."""
        self._others: list[tuple[Any, str, Any, Any]] = []
        self._operators: dict[int, str] = {}
        self._known_operators = -1
        self._is_put = False

    def look(self) -> list[Patch]:
        """A simulation begins: what stands for what."""
        ALIASES.look()
        if self._changes != ALIASES.changes or not self._stands():
            self._make()
        return self.patches

    def put(self) -> None:
        """In place; `look` has been there."""
        self._is_put = True
        for spaces, names, replacements, _ in (self._in_modules, self._new_in_modules):
            _exhaust(map(setitem, spaces, names, replacements))
        for holder, name, replacement, _ in self._others:
            setattr(holder, name, replacement)
        self._tell_compiler()

    def take_away(self) -> None:
        """What was there is there again, also where not all had been put."""
        if not self._is_put:
            return
        self._is_put = False
        known = torch.jit._builtins._get_builtin_table()
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

    def _stands(self) -> bool:
        return all(map(is_, map(call, self._readers, self._names, repeat(MISSING)), self._real))

    def _make(self) -> None:
        made = {(id(holder), name): (holder, name, value) for maker in self._makers for holder, name, value in maker()}
        self._names = [name for _, name, _ in made.values()]
        self._readers = [_reader(holder) for holder, _, _ in made.values()]
        self._real = [*map(call, self._readers, self._names, repeat(MISSING))]
        self.patches = [
            (holder, name, resembling(real, value))
            for (holder, name, value), real in zip(made.values(), self._real, strict=True)
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
        """TorchScript knows some of torch's functions (torch.save) as operators: so does it what stands for them."""
        known = torch.jit._builtins._get_builtin_table()
        if self._known_operators != len(known):
            self._known_operators = len(known)
            pairs = zip(self._real, self.patches, strict=True)
            self._operators = {id(ours): known[id(real)] for real, (_, _, ours) in pairs if id(real) in known}
        known.update(self._operators)


def _exhaust(steps: Iterable[Any]) -> None:
    deque(steps, maxlen=0)
