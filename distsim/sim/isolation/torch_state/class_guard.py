"""Finds the classes of torch whose attributes a simulated rank has assigned."""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distsim.torch_compat.state import CLASSES_THAT_TORCH_ASSIGNS, MODULES_OF_CLASSES

# CPython marks a class when it caches a look-up in it, and takes the mark from the class and all that inherit from it
# when an attribute is assigned. A guard is an heir of up to 64 classes in which nobody else looks anything up, so one
# missing mark says that one of the 64 was assigned to. CPython 3.13 no longer marks classes; there each is watched.

MISSING = object()
VALID_VERSION_TAG = 1 << 19
"""Py_TPFLAGSVALID_VERSION_TAG (Include/object.h of CPython 3.11 and 3.12): the mark, in a class's `__flags__`."""
_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the class was defined in Python."""
_IN_GUARD = 64
"""Classes watched by one guard: more make its method resolution order slow to work out."""
_PICKLES_CACHE = "__slotnames__"
"""Attribute in which pickle caches slot names in a class; equal in all ranks, so it is not swapped."""
_GUARDED_ALONE = frozenset({"_TensorMeta", "_ParameterMeta", "_BufferMeta", "OpaqueBaseMeta"})
"""Metaclasses whose classes have an heir each. Classes of others (pybind11's, enumerations, autograd's
functions) are not guarded."""

flags_of: Callable[[type], int] = vars(type)["__flags__"].__get__
"""Returns the flags of a class, past its own attributes."""


def _are_marked() -> bool:
    class Base:
        pass

    class Heir(Base):
        pass

    getattr(Heir, "unknown", None)
    return bool(Heir.__flags__ & VALID_VERSION_TAG)


CLASSES_ARE_MARKED = _are_marked()
"""False since CPython 3.13, which reports assignments to watchers instead."""


class _Watcher:
    """Watched classes that were assigned to (PyType_AddWatcher, C API of CPython 3.12 and later)."""

    def __init__(self) -> None:
        self.assigned: set[type] = set()
        self._callback = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(self._note)
        self._number: int = ctypes.pythonapi.PyType_AddWatcher(self._callback)

    def _note(self, cls: type) -> int:
        self.assigned.add(cls)
        return 0

    def watch(self, cls: type) -> None:
        """Report the next assignment to *cls*: CPython reports one, and then none until a look-up."""
        self.assigned.discard(cls)
        ctypes.pythonapi.PyType_Watch(self._number, ctypes.py_object(cls))


WATCHER = None if CLASSES_ARE_MARKED else _Watcher()
"""Watches classes where CPython does not mark them; None where it does."""


class ClassGuard:
    """Detects whether an attribute of one of *classes* was assigned since the last check."""

    def __init__(self, sentinel: type, classes: Sequence[type]) -> None:
        self.sentinel = sentinel
        """Heir of the classes, or the one class that is watched by itself."""
        self.classes = classes
        self.accept()

    def rest(self) -> None:
        """Let CPython report the next assignment."""
        if WATCHER is None:
            _ = self.sentinel._looked_up  # type: ignore[attr-defined]
        else:
            WATCHER.watch(self.sentinel)

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


def has_guarded_classes(module: str) -> bool:
    """Return whether classes of a module of that name are guarded."""
    return module == "torch" or module.startswith(MODULES_OF_CLASSES)


def is_guardable(cls: type) -> bool:
    """Return whether *cls* was defined in Python, so that its attributes can be assigned."""
    return bool(cls.__flags__ & _HEAP_TYPE)


def guards_of(classes: Sequence[type]) -> list[ClassGuard]:
    """Return guards over *classes*.

    Where CPython marks classes, those that can have a common subclass are watched through that subclass.
    """
    if WATCHER is not None:
        return [ClassGuard(cls, [cls]) for cls in classes]
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
