"""Whether an attribute of a class was assigned: CPython marks the class, with all that inherit from it."""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any

import numpy as np

from distsim.sim.isolation.torch_state.words import TAGS_ARE_THERE, reader, space_of, tag_at
from distsim.torch_compat.state import MODULES_OF_CLASSES

__all__ = [
    "MISSING",
    "ClassGuard",
    "guards_of",
    "has_guarded_classes",
    "marks_at",
    "marks_of",
    "may_be_guarded",
    "unmarked",
]

MISSING = object()
_IN_GUARD = 64
"""Classes watched by one guard: more make its method resolution order slow to work out."""
_PICKLES_CACHE = "__slotnames__"
"""What pickle keeps in a class, alike in all ranks: to put it in and take it out would be an assignment each time."""
_VALID_VERSION_TAG = 1 << 19
"""Py_TPFLAGS_VALID_VERSION_TAG (CPython's object.h): cleared in a class and all that inherit from it
by any assignment to one of its attributes, set again by the next look-up."""
_HEAP_TYPE = 1 << 9
_FLAGS_AT = 168
"""Where a class keeps them: after 21 words, in CPython 3.8 to 3.14."""
_GUARDED_ALONE = frozenset({"_TensorMeta", "_ParameterMeta", "_BufferMeta", "OpaqueBaseMeta"})
"""Metaclasses whose classes have an heir each. Classes of others (pybind11's, enumerations, autograd's
functions) are not guarded."""


_Word = ctypes.c_ulong
_FLAGS_ARE_THERE = all(
    _Word.from_address(id(cls) + _FLAGS_AT).value == cls.__flags__ for cls in (int, type, abc.ABC, Iterator)
)


def marks_of(classes: Sequence[type]) -> tuple[Callable[[], Any], Any]:
    """A function, and what it answers as long as every class of *classes* has its mark."""
    if not _FLAGS_ARE_THERE:
        return lambda: [*map(attrgetter("__flags__"), classes)], [c.__flags__ | _VALID_VERSION_TAG for c in classes]
    read = reader(marks_at(classes))
    return read, b"".join([_Word(word | _VALID_VERSION_TAG) for word in memoryview(read()).cast("L")])


def marks_at(classes: Sequence[type]) -> list[int]:
    """Where the marks of *classes* are; empty where this Python has them elsewhere."""
    return [id(cls) + _FLAGS_AT for cls in classes] if _FLAGS_ARE_THERE else []


def unmarked(marks: Any) -> list[int]:
    """Places of the classes that have lost theirs; *marks* as the function of `marks_of` answers it."""
    words = np.frombuffer(marks, dtype=np.uint64) if isinstance(marks, bytes) else np.array(marks, dtype=np.uint64)
    return np.flatnonzero(words & np.uint64(_VALID_VERSION_TAG) == 0).tolist()


def has_guarded_classes(module: str) -> bool:
    """Whether classes of a module of that name are guarded."""
    return module == "torch" or module.startswith(MODULES_OF_CLASSES)


def may_be_guarded(cls: type) -> bool:
    """Whether *cls* was made in Python: its attributes may be assigned."""
    return bool(cls.__flags__ & _HEAP_TYPE)


class ClassGuard:
    """Says whether an attribute of one of *classes* has been assigned since it was last asked."""

    def __init__(self, sentinel: type, classes: Sequence[type]) -> None:
        self.sentinel = sentinel
        self.classes = classes
        spaces = [space_of(cls) for cls in classes] if TAGS_ARE_THERE else []
        self._tags = reader([tag_at(space) for space in spaces])
        """Changes with what one of *classes* holds itself, and not with what it inherits."""
        self.accept()

    def rest(self) -> None:
        _ = self.sentinel._looked_up  # type: ignore[attr-defined]

    def changes(self) -> Iterator[tuple[type, str, Any]]:
        """Class, name and former value of what was assigned."""
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
        """What the classes hold now is everyone's."""
        self._before = [(cls, dict(vars(cls))) for cls in self.classes]
        self._accepted = self._tags()
        self.rest()

    def is_as_accepted(self, is_known: Callable[[type], bool]) -> bool:
        """Whether all classes hold what they held: what was assigned was of one that they inherit from, or it
        *is_known* to be as before."""
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
    """Guards over *classes*: where they can have one heir, that heir is looked at for all of them."""
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
    """The mark of a class comes back with the next look-up in it; nobody looks into an heir but us."""
    try:
        heir = type(classes[0])("_Heir", tuple(classes), {"_looked_up": None})  # found at once, and nowhere else
    except TypeError:  # no common order of resolution, or a class that has no heirs
        half = len(classes) // 2
        return _heirs(classes[:half]) + _heirs(classes[half:]) if half else []
    return [ClassGuard(heir, classes)]
