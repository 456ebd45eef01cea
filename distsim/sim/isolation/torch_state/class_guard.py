"""Finds the classes of torch whose attributes a simulated rank has assigned."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distsim.torch_compat.state import CLASSES_THAT_TORCH_ASSIGNS, MODULES_OF_CLASSES

__all__ = [
    "CLASSES_ARE_MARKED",
    "MISSING",
    "ClassGuard",
    "Sentinels",
    "guards_of",
    "has_guarded_classes",
    "is_guardable",
]

# CPython marks a class when it caches a look-up in it, and takes the mark from the class and all that inherit from it
# when an attribute is assigned. A guard is an heir of up to 64 classes in which nobody else looks anything up, so one
# missing mark says that one of the 64 was assigned to.

MISSING = object()
_VALID_VERSION_TAG = 1 << 19
"""Py_TPFLAGS_VALID_VERSION_TAG (Include/object.h of CPython 3.11 to 3.13): the mark, in a class's `__flags__`."""
_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the class was defined in Python."""
_IN_GUARD = 64
"""Classes watched by one guard: more make its method resolution order slow to work out."""
_PICKLES_CACHE = "__slotnames__"
"""Attribute in which pickle caches slot names in a class; equal in all ranks, so it is not swapped."""
_GUARDED_ALONE = frozenset({"_TensorMeta", "_ParameterMeta", "_BufferMeta", "OpaqueBaseMeta"})
"""Metaclasses whose classes have an heir each. Classes of others (pybind11's, enumerations, autograd's
functions) are not guarded."""

_flags_of: Callable[[type], int] = vars(type)["__flags__"].__get__


def _are_marked() -> bool:
    class Base:
        pass

    class Heir(Base):
        pass

    getattr(Heir, "unknown", None)
    return bool(Heir.__flags__ & _VALID_VERSION_TAG)


CLASSES_ARE_MARKED = _are_marked()
"""False since CPython 3.14: there all ranks share what a program assigns to classes of torch (docs/limits.md)."""


class ClassGuard:
    """Detects whether an attribute of one of *classes* was assigned since the last check."""

    def __init__(self, sentinel: type, classes: Sequence[type]) -> None:
        self.sentinel = sentinel
        self.classes = classes
        self.accept()

    def rest(self) -> None:
        """Let CPython mark the sentinel again."""
        _ = self.sentinel._looked_up  # type: ignore[attr-defined]

    def changes(self) -> Iterator[tuple[type, str, Any]]:
        """Yield class, name and previous value of each assigned attribute."""
        for cls, before in self._before:
            now = vars(cls)
            if now == before:
                continue
            for name, value in before.items():
                if now.get(name, MISSING) is not value:
                    yield cls, name, value
            if len(now) > len(before):
                yield from ((cls, name, MISSING) for name in now if name not in before and name != _PICKLES_CACHE)

    def accept(self) -> None:
        """Take the current content of the classes as the shared one."""
        self._before = [(cls, dict(vars(cls))) for cls in self.classes]
        self.rest()


class Sentinels:
    """Sentinels of *guards*, checked in one step."""

    def __init__(self, guards: Sequence[ClassGuard]) -> None:
        self._guards = guards
        self._classes = [guard.sentinel for guard in guards]
        self._at_rest = [cls.__flags__ | _VALID_VERSION_TAG for cls in self._classes]

    def assigned(self) -> list[ClassGuard]:
        """Return the guards whose sentinel has lost its mark."""
        flags = [*map(_flags_of, self._classes)]
        if flags == self._at_rest or not CLASSES_ARE_MARKED:
            return []
        return [guard for guard, flag in zip(self._guards, flags, strict=True) if not flag & _VALID_VERSION_TAG]


def has_guarded_classes(module: str) -> bool:
    """Return whether classes of a module of that name are guarded."""
    return module == "torch" or module.startswith(MODULES_OF_CLASSES)


def is_guardable(cls: type) -> bool:
    """Return whether *cls* was defined in Python, so that its attributes can be assigned."""
    return bool(cls.__flags__ & _HEAP_TYPE)


def guards_of(classes: Sequence[type]) -> list[ClassGuard]:
    """Return guards over *classes*. Classes that can have a common subclass are watched through that subclass."""
    families: dict[Any, list[type]] = {}
    for cls in classes:
        if type(cls).__name__ in _GUARDED_ALONE or cls.__name__ in CLASSES_THAT_TORCH_ASSIGNS:
            families[cls] = [cls]
        elif type(cls) in (type, abc.ABCMeta) and getattr(cls.__init_subclass__, "__func__", None) is None:
            layout = next(b for b in cls.__mro__ if not b.__flags__ & _HEAP_TYPE)
            families.setdefault((type(cls), layout), []).append(cls)
    guards = []
    for some in families.values():
        some.sort(key=lambda cls: -len(cls.__mro__))
        for begin in range(0, len(some), _IN_GUARD):
            guards += _guards_by_heirs(some[begin : begin + _IN_GUARD])
    return guards


def _guards_by_heirs(classes: Sequence[type]) -> list[ClassGuard]:
    """Return guards by common heirs of *classes*, whose marks return only with the next look-up, which only we make."""
    try:
        heir = type(classes[0])("_Heir", tuple(classes), {"_looked_up": None})  # found at once, and nowhere else
    except TypeError:  # no common order of resolution, or a class that has no heirs
        half = len(classes) // 2
        return _guards_by_heirs(classes[:half]) + _guards_by_heirs(classes[half:]) if half else []
    return [ClassGuard(heir, classes)]
