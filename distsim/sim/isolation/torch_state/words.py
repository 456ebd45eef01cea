"""Numbers that CPython keeps in memory, many of them read in one step.

A dictionary has a number that every change of any dictionary gives it anew (`ma_version_tag`, PEP 509): where none
of some numbers has changed, nobody need look at what the dictionaries hold.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, cast

import numpy as np

__all__ = ["TAGS_ARE_THERE", "WORD_BYTES", "Kinds", "reader", "space_of", "tag_at"]

WORD_BYTES = 8
"""Of what `reader` reads."""

_TAG_AT = object.__basicsize__ + 8
"""After the head and `ma_used` (CPython 3.6 to 3.13, Include/cpython/dictobject.h)."""


def tag_at(held: dict[Any, Any]) -> int:
    """Where the number of *held* is."""
    return id(held) + _TAG_AT


def space_of(holder: Any) -> dict[str, Any]:
    """The dictionary that a module, an object or a class keeps its attributes in, which of a class `vars` does not
    hand out."""
    space: Any = vars(holder)
    if isinstance(space, MappingProxyType):
        (space,) = gc.get_referents(space)
    return cast("dict[str, Any]", space)


def reader(addresses: Sequence[int]) -> Callable[[], bytes]:
    """A function that reads the 64-bit words at *addresses*, all within objects that live on: some nanoseconds each."""
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
        """All are of *kind* now; False, and nothing is done, where one is not plain."""
        return self._exchange(self._plain, self._kind, len(self._things))

    def take_back(self) -> bool:
        """All are plain again; False, and nothing is done, where one is not of *kind*."""
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
    """Whether an object's class is the last word of its head, and its count the first one of a class that it has."""

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
    """Whether each way to change a dictionary, or an object's or module's attributes, gives a number never seen."""

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
