"""Pickles of plain data (containers, numbers, strings), as Flight Recorder writes them, read from anybody.

Python's C unpickler, even one that finds no classes, does what ten bytes ask of it: a memo of 32 GiB, the hash of a
tuple nested a million deep (a crash) or shared forty times over (for ever). Its Python twin keeps the memo in a
dictionary and reads no more than there is; here it knows the opcodes of plain data only, and takes strings and numbers
alone as keys.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

__all__ = ["loads"]

_PLAIN = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT LONG FLOAT BININT BININT1 BININT2 BINFLOAT LONG1 LONG4
    STRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS
    PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET
""".split()  # noqa: SIM905
_LOADS_CODE = {pickle.GLOBAL[0], pickle.STACK_GLOBAL[0], pickle.INST[0]}
_FROM_OUTSIDE = {pickle.PERSID[0], pickle.BINPERSID[0]}
_KEYS = {str, int, float, bool, bytes}


def loads(data: bytes) -> Any:
    """The value that *data* holds; `pickle.UnpicklingError` for what is broken or no plain data."""
    try:
        return _Reader(io.BytesIO(data), encoding="latin-1").load()
    except (EOFError, IndexError, struct.error):
        raise pickle.UnpicklingError("it ends in the middle, or takes what it has not put there") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise pickle.UnpicklingError(str(error)) from None


class _Opcodes(dict[int, Callable[[Any], None]]):
    """How to load each opcode; an error for all others."""

    def __missing__(self, op: int) -> Callable[[Any], None]:
        if op in _LOADS_CODE:
            raise pickle.UnpicklingError("it wants to load code, which no dump needs")
        if op in _FROM_OUTSIDE:
            raise pickle.UnpicklingError("it wants an object from outside, which no dump needs")
        raise pickle.UnpicklingError(f"opcode {op:#04x} is not one of plain data")


class _Reader(pickle._Unpickler):
    """Python's own, with fewer opcodes and without keys that have to be hashed piece by piece."""

    stack: list[Any]
    dispatch = _Opcodes({op: pickle._Unpickler.dispatch[op] for name in _PLAIN for op in getattr(pickle, name)})

    def load_dict(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self.stack.append({})
        self._set(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())  # type: ignore[attr-defined]

    def _set(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        if type(target) is not dict:
            raise pickle.UnpicklingError("something is put under a key of what is no dictionary")
        for key in keys:
            if type(key) not in _KEYS:
                raise pickle.UnpicklingError(f"a key of type {type(key).__name__}")
        target.update(zip(keys, items[1::2], strict=True))

    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
