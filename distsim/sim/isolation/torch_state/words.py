"""Numbers that CPython keeps in memory, many of them read in one step.

A dictionary has a number that every change of any dictionary gives it anew (`ma_version_tag`, PEP 509): where none
of some numbers has changed, nobody need look at what the dictionaries hold.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["TAGS_ARE_THERE", "WORD_BYTES", "reader", "tag_at"]

WORD_BYTES = 8
"""Of what `reader` reads."""

_TAG_AT = object.__basicsize__ + 8
"""After the head and `ma_used` (CPython 3.6 to 3.13, Include/cpython/dictobject.h)."""


def tag_at(held: dict[Any, Any]) -> int:
    """Where the number of *held* is."""
    return id(held) + _TAG_AT


def reader(addresses: Sequence[int]) -> Callable[[], bytes]:
    """A function that reads the 64-bit words at *addresses*, all within objects that live on: some nanoseconds each."""
    if not addresses:
        return bytes
    first = min(addresses)
    memory = np.asarray(_Memory(first, (max(addresses) - first) // 8 + 1))
    take, at = memory.take, np.array([(address - first) // 8 for address in addresses], dtype=np.intp)
    return lambda: take(at).tobytes()


class _Memory:
    """*words* of them from *address* on, as an array sees them."""

    def __init__(self, address: int, words: int) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (words,), "typestr": "<u8", "version": 3}


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
