"""Attributes that are replaced during a simulation: computed once per process, and exchanged all at once.

A test of four ranks takes milliseconds, and there are hundreds of attributes: checking that the replacements are
still valid, installing them and removing them therefore avoids a Python step for each.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import call, setitem
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np

from distsim.sim.isolation.modules.aliases import ALIASES
from distsim.sim.isolation.torch_state.words import TAGS_ARE_THERE, reader, space_of, tag_at
from distsim.sim.isolation.wraps import resembling
from distsim.torch_compat.compiler import GET_BUILTIN_TABLE

__all__ = ["MISSING", "Patch", "PatchTable", "attribute_of"]

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
        self._writes = _Writes([], [])
        """Holders written to since the last search: first the modules of these names, then other holders."""
        self._modules: list[str] = []
        self._holders: list[Any] = []
        self._held: dict[int, list[int]] = {}
        """Numbers of the patches of each of these holders."""
        self._unwatched: list[int] = []
        self._watched: set[int] = set()
        """Patches of holders that are not watched for writes, and the watched holders (`id`)."""
        self._anew: frozenset[int] | None = None
        """Holders (`id`) whose attributes may have changed since the patches were last applied; None if all may have.
        """

    def look(self) -> list[Patch]:
        """Return the valid patches at the start of a simulation."""
        written = self._writes.found()
        if written is None:
            ALIASES.look()
            stands, self._anew = self._stand(range(len(self._real))), None
        else:
            ALIASES.look([self._modules[number] for number in written if number < len(self._modules)])
            stands = self._stand(self._unwatched + [n for number in written for n in self._held.get(number, ())])
            self._anew = frozenset(id(self._holders[n]) for number in written for n in self._held.get(number, ()))
        if self._changes != ALIASES.changes or not stands:
            self._make()
            self._watch()
            self._anew = None
        elif written is not None:
            self._writes.seen()
        return self.patches

    def is_as_put(self, holder: Any) -> bool:
        """Return whether *holder*, which is watched, is as it was when patches were installed for the last
        simulation.
        """
        return self._anew is not None and id(holder) in self._watched and id(holder) not in self._anew

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
        self._writes.begin()

    def take_away(self) -> None:
        """Restore everything that was patched, even if not all patches were applied."""
        if not self._is_put:
            return
        self._is_put = False
        with self._writes.of_ours():
            self._take_away()

    def _take_away(self) -> None:
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

    def _stand(self, numbers: Sequence[int]) -> bool:
        """Return whether the originals of patches *numbers* are unchanged."""
        return all(self._readers[n](self._names[n], MISSING) is self._real[n] for n in numbers)

    def _watch(self) -> None:
        """Find the modules that may have the patched objects under other names, and the holders of patches."""
        modules = ALIASES.spaces
        self._modules = list(modules)
        spaces = {id(space): space for space in modules.values()}
        if len(spaces) != len(modules):  # two names of one module
            self._modules = [name for name, space in modules.items() if spaces.pop(id(space), None) is not None]
            spaces = {id(modules[name]): modules[name] for name in self._modules}
        holding: dict[int, list[int]] = {}
        self._unwatched, self._watched = [], set()
        self._holders = [holder for holder, _, _ in self.patches]
        for number, holder in enumerate(self._holders):
            space = None if isinstance(holder, FunctionType | CellType) else space_of(holder)
            if type(space) is not dict:
                self._unwatched.append(number)
            else:
                spaces[id(space)] = space
                holding.setdefault(id(space), []).append(number)
                self._watched.add(id(holder))
        self._held = {number: holding[at] for number, at in enumerate(spaces) if at in holding}
        self._writes = _Writes(list(spaces.values()), list(self._held))

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


class _Writes:
    """Detects which of *spaces* were written to by others than a patch table, by the version of a dictionary
    (words.py).
    """

    def __init__(self, spaces: Sequence[dict[str, Any]], patched: Sequence[int]) -> None:
        self._spaces = spaces
        tags = [tag_at(space) for space in spaces] if TAGS_ARE_THERE else []
        self._tags, self._tags_of_ours = reader(tags), reader([tags[number] for number in patched] if tags else [])
        self._patched = np.array(patched, dtype=np.intp)
        """The numbers of those that a patch table writes to: a tenth of all."""
        self._known = self._now = _numbers(self._tags)
        self._begun = _numbers(self._tags_of_ours)

    def found(self) -> list[int] | None:
        """Return the numbers of those written to since the last look; None: that is not known."""
        if not len(self._known):
            return None
        self._now = _numbers(self._tags)
        return [int(number) for number in np.flatnonzero(self._now != self._known)]

    def seen(self) -> None:
        """Mark the result of `found` as known."""
        self._known = self._now

    def begin(self) -> None:
        """Start to watch for writes, after patches are installed."""
        self._begun = _numbers(self._tags_of_ours)

    @contextlib.contextmanager
    def of_ours(self) -> Iterator[None]:
        """Return a context in which the patches are removed.

        Modules that nothing else writes to count as unchanged after it.
        """
        quiet = _numbers(self._tags_of_ours) == self._begun
        yield
        if len(self._known):
            self._known = self._known.copy()
            self._known[self._patched[quiet]] = _numbers(self._tags_of_ours)[quiet]


def _numbers(read: Callable[[], bytes]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.frombuffer(read(), dtype=np.uint64)


def _exhaust(steps: Iterable[Any]) -> None:
    deque(steps, maxlen=0)
