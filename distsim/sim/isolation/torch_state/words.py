"""Numbers that CPython keeps in memory, and whether an attribute of a class was assigned."""

from __future__ import annotations

import abc
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from distsim.torch_compat.state import MODULES_OF_CLASSES

__all__ = [
    "MISSING",
    "TAGS_ARE_THERE",
    "WORD_BYTES",
    "ClassGuard",
    "Kinds",
    "guards_of",
    "has_guarded_classes",
    "marks_at",
    "marks_of",
    "may_be_guarded",
    "reader",
    "space_of",
    "tag_at",
    "unmarked",
]

# -- Numbers that CPython keeps in memory, many of them read in one step.
#
# A dictionary has a number that every change of any dictionary gives it anew (`ma_version_tag`, PEP 509): where none
# of some numbers has changed, nobody need look at what the dictionaries hold.

WORD_BYTES = 8
"""Bytes of a word that `reader` reads."""

_TAG_AT = object.__basicsize__ + 8
"""Offset of a dictionary's version, after the head and `ma_used` (CPython 3.6 to 3.13,
Include/cpython/dictobject.h).
"""


def tag_at(held: dict[Any, Any]) -> int:
    """Return the address of the version tag of the dict *held*."""
    return id(held) + _TAG_AT


def space_of(holder: Any) -> dict[str, Any]:
    """Return the dictionary that a module, an object or a class keeps its attributes in, which of a class `vars`
    does not hand out.
    """
    space: Any = vars(holder)
    if isinstance(space, MappingProxyType):
        (space,) = gc.get_referents(space)
    return cast("dict[str, Any]", space)


def reader(addresses: Sequence[int]) -> Callable[[], bytes]:
    """Return a function that reads the 64-bit words at *addresses*, all within objects that live on: some
    nanoseconds each.
    """
    if not addresses:
        return bytes
    if len(addresses) == 1:
        word = ctypes.c_uint64.from_address(addresses[0])
        return lambda: word.value.to_bytes(WORD_BYTES, sys.byteorder)
    first = min(addresses)
    memory = np.asarray(_Memory(first, (max(addresses) - first) // 8 + 1))
    take, at = memory.take, np.array([(address - first) // 8 for address in addresses], dtype=np.intp)
    return lambda: take(at).tobytes()


class Kinds:
    """The classes of *things*, which live as long as this does, exchanged all at once: what `thing.__class__ = kind`
    does a thousand times. *kind* was made in Python, *plain* was not, and Python lets their instances change between
    the two: the class is one word in each, and *kind* counts those that have it."""

    def __init__(self, things: Sequence[Any], plain: type, kind: type) -> None:
        self._things = {id(thing): thing for thing in things}  # a module may have two names
        addresses = [number + object.__basicsize__ - WORD_BYTES for number in self._things]
        first = min(addresses, default=id(kind))
        self._memory = np.asarray(_Memory(first, (max(addresses, default=first) - first) // 8 + 1, writable=True))
        self._at = np.array([(address - first) // 8 for address in addresses], dtype=np.intp)
        self._plain, self._kind = id(plain), id(kind)
        self._count = ctypes.c_ssize_t.from_address(id(kind))

    def give(self) -> bool:
        """Set the class of all objects to *kind*; return False without any change if one is not plain."""
        return self._exchange(self._plain, self._kind, len(self._things))

    def take_back(self) -> bool:
        """Restore the plain class of all objects; return False without any change if one is not of *kind*."""
        return self._exchange(self._kind, self._plain, -len(self._things))

    def _exchange(self, before: int, after: int, more: int) -> bool:
        if not KINDS_ARE_THERE or not self._things or (self._memory.take(self._at) != before).any():
            return False
        self._count.value += more
        self._memory[self._at] = after
        return True


class _Memory:
    """*words* of them from *address* on, as an array sees them."""

    def __init__(self, address: int, words: int, writable: bool = False) -> None:
        data = (address, not writable)
        self.__array_interface__ = {"data": data, "shape": (words,), "typestr": "<u8", "version": 3}


def _kinds_tested() -> bool:
    """Return whether an object's class is the last word of its head, and a class's reference count the first of its
    own.
    """

    class Thing:
        pass

    if object.__basicsize__ != 2 * WORD_BYTES or sys.version_info >= (3, 12):
        return False
    before = ctypes.c_ssize_t.from_address(id(Thing)).value
    things = [Thing() for _ in range(3)]
    words = [ctypes.c_size_t.from_address(id(thing) + WORD_BYTES).value for thing in things]
    return words == [id(Thing)] * 3 and ctypes.c_ssize_t.from_address(id(Thing)).value == before + 3


KINDS_ARE_THERE = _kinds_tested()
"""CPython 3.11's objects begin with a count and a class, no word more; later ones count in other ways."""


def _tested() -> bool:
    """Return whether every way to change a dictionary, or an object's or module's attributes, gives a new version
    number.
    """

    class Thing:
        pass

    thing = Thing()
    held: dict[str, int] = {"a": 1}
    changes: tuple[Callable[[], object], ...] = (
        lambda: held.update(a=2),
        lambda: held.__setitem__("b", 1),
        lambda: held.pop("b"),
        held.clear,
        lambda: held.setdefault("c", 3),
    )
    seen = [ctypes.c_uint64.from_address(tag_at(held)).value]
    for change in changes:
        change()
        seen.append(ctypes.c_uint64.from_address(tag_at(held)).value)
    of_thing = vars(thing)
    for number in range(20):  # past what the interpreter makes of a line that runs often
        thing.number = number  # type: ignore[attr-defined]
        seen.append(ctypes.c_uint64.from_address(tag_at(of_thing)).value)
    return len(set(seen)) == len(seen)


TAGS_ARE_THERE = _tested()


# -- Whether an attribute of a class was assigned: CPython marks the class, with all that inherit from it.

MISSING = object()
_IN_GUARD = 64
"""Classes watched by one guard: more make its method resolution order slow to work out."""
_PICKLES_CACHE = "__slotnames__"
"""Attribute in which pickle caches slot names in a class; equal in all ranks, so it is not swapped."""
_VALID_VERSION_TAG = 1 << 19
"""Py_TPFLAGS_VALID_VERSION_TAG (CPython's object.h): cleared in a class and all that inherit from it
by any assignment to one of its attributes, set again by the next look-up."""
_VERSION_AT = 384
"""Offset of a class's version number (`tp_version_tag`, 32 bits), which is 0 if the mark is missing."""
_VERSION = np.uint64((1 << 32) - 1)
_HEAP_TYPE = 1 << 9
_FLAGS_AT = 168
"""Offset of a class's flags: after 21 words, in CPython 3.8 to 3.14."""
_GUARDED_ALONE = frozenset({"_TensorMeta", "_ParameterMeta", "_BufferMeta", "OpaqueBaseMeta"})
"""Metaclasses whose classes have an heir each. Classes of others (pybind11's, enumerations, autograd's
functions) are not guarded."""


_Word = ctypes.c_ulong
_FLAGS_ARE_THERE = all(
    _Word.from_address(id(cls) + _FLAGS_AT).value == cls.__flags__ for cls in (int, type, abc.ABC, Iterator)
)


def _are_versions_there() -> bool:
    """Return whether the version number replaces the mark, which CPython no longer sets since 3.14."""

    class Base:
        pass

    class Heir(Base):
        pass

    version = ctypes.c_uint32.from_address(id(Heir) + _VERSION_AT)
    getattr(Heir, "unknown", None)
    is_marked, before = Heir.__flags__ & _VALID_VERSION_TAG, version.value
    Base.attribute = 1  # type: ignore[attr-defined]
    return not is_marked and before != 0 and version.value == 0


_VERSIONS_ARE_THERE = _FLAGS_ARE_THERE and _are_versions_there()


def marks_of(classes: Sequence[type]) -> tuple[Callable[[], Any], Any]:
    """Return a function and its result as long as every class in *classes* has its mark."""
    if _VERSIONS_ARE_THERE:
        versions = reader([id(cls) + _VERSION_AT for cls in classes])
        mark = np.uint64(_VALID_VERSION_TAG)
        at_rest = np.full(len(classes), mark).tobytes()
        return lambda: ((np.frombuffer(versions(), np.uint64) & _VERSION != 0) * mark).tobytes(), at_rest
    if not _FLAGS_ARE_THERE:
        return lambda: [*map(attrgetter("__flags__"), classes)], [c.__flags__ | _VALID_VERSION_TAG for c in classes]
    read = reader(marks_at(classes))
    return read, b"".join([_Word(word | _VALID_VERSION_TAG) for word in memoryview(read()).cast("L")])


def marks_at(classes: Sequence[type]) -> list[int]:
    """Return the addresses of the type flags of *classes*; empty if this Python stores them elsewhere."""
    return [id(cls) + _FLAGS_AT for cls in classes] if _FLAGS_ARE_THERE else []


def unmarked(marks: Any) -> list[int]:
    """Return places of the classes that have lost theirs; *marks* as the function of `marks_of` answers it."""
    words = np.frombuffer(marks, dtype=np.uint64) if isinstance(marks, bytes) else np.array(marks, dtype=np.uint64)
    return np.flatnonzero(words & np.uint64(_VALID_VERSION_TAG) == 0).tolist()


def has_guarded_classes(module: str) -> bool:
    """Return whether classes of a module of that name are guarded."""
    return module == "torch" or module.startswith(MODULES_OF_CLASSES)


def may_be_guarded(cls: type) -> bool:
    """Return whether *cls* was defined in Python, so that its attributes can be assigned."""
    return bool(cls.__flags__ & _HEAP_TYPE)


class ClassGuard:
    """Detects whether an attribute of one of *classes* was assigned since the last check."""

    def __init__(self, sentinel: type, classes: Sequence[type]) -> None:
        self.sentinel = sentinel
        self.classes = classes
        spaces = [space_of(cls) for cls in classes] if TAGS_ARE_THERE else []
        self._tags = reader([tag_at(space) for space in spaces])
        """Reads version tags that change with attributes of the classes themselves, and not with inherited ones."""
        self.accept()

    def rest(self) -> None:
        _ = self.sentinel._looked_up  # type: ignore[attr-defined]

    def changes(self) -> Iterator[tuple[type, str, Any]]:
        """Yield class, name and previous value of each assigned attribute."""
        for cls, before in self._before:
            now = vars(cls)
            if len(now) == len(before) and all(map(is_, map(now.get, before), before.values())):
                continue  # no step of it was Python's
            for name, value in before.items():
                if now.get(name, MISSING) is not value:
                    yield cls, name, value
            if len(now) > len(before):
                yield from ((cls, name, MISSING) for name in now if name not in before and name != _PICKLES_CACHE)

    def accept(self) -> None:
        """Take the current content of the classes as the shared one."""
        self._before = [(cls, dict(vars(cls))) for cls in self.classes]
        self._accepted = self._tags()
        self.rest()

    def is_as_accepted(self, is_known: Callable[[type], bool]) -> bool:
        """Return whether all classes have their accepted attributes.

        An assignment may have been to a class that they inherit from, or *is_known* says that the class is as
        before.
        """
        accepted, tags = self._accepted, self._tags()
        if not tags:
            return False
        if tags != accepted:
            pairs = zip(self.classes, memoryview(accepted).cast("Q"), memoryview(tags).cast("Q"), strict=True)
            if not all(is_known(cls) for cls, before, now in pairs if before != now):
                return False
            self._accepted = tags
        self.rest()
        return True


def guards_of(classes: list[type]) -> list[ClassGuard]:
    """Return guards over *classes*. Classes that can have a common subclass are watched through that subclass."""
    families: dict[Any, list[type]] = {}
    for cls in classes:
        if type(cls).__name__ in _GUARDED_ALONE:
            families[cls] = [cls]
        elif type(cls) in (type, abc.ABCMeta) and getattr(cls.__init_subclass__, "__func__", None) is None:
            layout = next(b for b in cls.__mro__ if not b.__flags__ & _HEAP_TYPE)
            families.setdefault((type(cls), layout), []).append(cls)
    guards = []
    for some in families.values():
        some.sort(key=lambda cls: -len(cls.__mro__))
        for begin in range(0, len(some), _IN_GUARD):
            guards += _heirs(some[begin : begin + _IN_GUARD])
    return guards


def _heirs(classes: list[type]) -> list[ClassGuard]:
    """Return guards of the subclasses of *classes*, whose marks return only with the next look-up, which only we
    make.
    """
    try:
        heir = type(classes[0])("_Heir", tuple(classes), {"_looked_up": None})  # found at once, and nowhere else
    except TypeError:  # no common order of resolution, or a class that has no heirs
        half = len(classes) // 2
        return _heirs(classes[:half]) + _heirs(classes[half:]) if half else []
    return [ClassGuard(heir, classes)]
