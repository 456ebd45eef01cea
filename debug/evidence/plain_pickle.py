"""Pickles of plain data (containers, numbers, strings), as Flight Recorder writes them, read from anybody.

Python's own unpickler, even one that finds no classes, does what ten bytes ask of it: a memo of 32 GiB, the hash of
a tuple nested a million deep (a crash) or shared forty times over (for ever). This one knows the plain opcodes only,
keeps its memo in a dictionary, takes strings and numbers alone as keys, and checks every length against what is there.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any

__all__ = ["loads"]

_FIXED: dict[int, Callable[[bytes, int], tuple[Any]]] = {
    pickle.BININT[0]: struct.Struct("<i").unpack_from,
    pickle.BININT1[0]: struct.Struct("<B").unpack_from,
    pickle.BININT2[0]: struct.Struct("<H").unpack_from,
    pickle.BINFLOAT[0]: struct.Struct(">d").unpack_from,
}
_WIDTH = {pickle.BININT[0]: 4, pickle.BININT1[0]: 1, pickle.BININT2[0]: 2, pickle.BINFLOAT[0]: 8}
_CONSTANTS = {pickle.NONE[0]: None, pickle.NEWTRUE[0]: True, pickle.NEWFALSE[0]: False}
_EMPTY: dict[int, Callable[[], Any]] = {
    pickle.EMPTY_DICT[0]: dict,
    pickle.EMPTY_LIST[0]: list,
    pickle.EMPTY_TUPLE[0]: tuple,
}
_STRINGS = {pickle.SHORT_BINUNICODE[0]: 1, pickle.BINUNICODE[0]: 4, pickle.BINUNICODE8[0]: 8}
_BYTES = {pickle.SHORT_BINBYTES[0]: 1, pickle.BINBYTES[0]: 4, pickle.BINBYTES8[0]: 8}
_LONGS = {pickle.LONG1[0]: 1, pickle.LONG4[0]: 4}
_TUPLES = {pickle.TUPLE1[0]: 1, pickle.TUPLE2[0]: 2, pickle.TUPLE3[0]: 3}
BINGET, LONG_BINGET, LONG_BINPUT = pickle.BINGET[0], pickle.LONG_BINGET[0], pickle.LONG_BINPUT[0]
MEMOIZE, SHORT_BINUNICODE, BININT1 = pickle.MEMOIZE[0], pickle.SHORT_BINUNICODE[0], pickle.BININT1[0]
_LINES = {
    op[0] for op in (pickle.INT, pickle.LONG, pickle.FLOAT, pickle.STRING, pickle.UNICODE, pickle.PUT, pickle.GET)
}
_KEYS = {str, int, float, bool, bytes}
_LONGEST_LINE = 1 << 20
_LOADS_CODE = {pickle.GLOBAL[0], pickle.STACK_GLOBAL[0], pickle.INST[0]}
_FROM_OUTSIDE = {pickle.PERSID[0], pickle.BINPERSID[0]}


def loads(data: bytes) -> Any:
    """The value that *data* holds; `pickle.UnpicklingError` for what is broken or no plain data."""
    try:
        return _Reader(data).run()
    except (IndexError, struct.error):
        raise pickle.UnpicklingError("it ends in the middle, or takes what it has not put there") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Until STOP. The six opcodes that most of a dump consists of come first, and call nothing."""
        data, stack, memo, push = self.data, self.stack, self.memo, self.stack.append
        at, known, whole = 0, self._known, int.from_bytes
        while True:
            op = data[at]
            at += 1
            if op == BINGET:
                push(memo[data[at]] if data[at] in memo else known(data[at]))
                at += 1
            elif op == LONG_BINGET:
                push(known(whole(data[at : at + 4], "little")))
                at += 4
            elif op == MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif op == LONG_BINPUT:
                memo[whole(data[at : at + 4], "little")] = stack[-1]
                at += 4
            elif op == SHORT_BINUNICODE and at + data[at] < len(data):
                end = at + 1 + data[at]
                push(self._text(data[at + 1 : end]))
                at = end
            elif op == BININT1:
                push(data[at])
                at += 1
            else:
                self.at = at
                if op == pickle.STOP[0]:
                    return stack.pop()
                self._step(op)
                at = self.at

    def _step(self, op: int) -> None:
        """Any opcode; `self.at` is behind it."""
        data, stack = self.data, self.stack
        if (width := _STRINGS.get(op)) is not None:
            stack.append(self._text(self._block(width)))
        elif op == pickle.BINPUT[0]:
            self.memo[self._whole(1)] = stack[-1]
        elif op in _FIXED:
            stack.append(_FIXED[op](data, self.at)[0])
            self.at += _WIDTH[op]
        elif op in _EMPTY:
            stack.append(_EMPTY[op]())
        elif op == pickle.MARK[0]:
            self.marks.append(len(stack))
        elif op == pickle.SETITEMS[0]:
            self._set(self._since_mark())
        elif op == pickle.SETITEM[0]:
            value, key = stack.pop(), stack.pop()
            self._set([key, value])
        elif op == pickle.APPENDS[0]:
            items = self._since_mark()
            self._list().extend(items)
        elif op == pickle.APPEND[0]:
            item = stack.pop()
            self._list().append(item)
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _TUPLES:
            self._tuple(len(stack) - _TUPLES[op])
        elif op == pickle.TUPLE[0]:
            self._tuple(self.marks.pop())
        elif op == pickle.LIST[0]:
            stack.append(self._since_mark())
        elif op == pickle.DICT[0]:
            items = self._since_mark()
            stack.append({})
            self._set(items)
        elif (width := _LONGS.get(op)) is not None:
            stack.append(int.from_bytes(self._block(width), "little", signed=True))
        elif (width := _BYTES.get(op)) is not None:
            stack.append(self._block(width))
        elif op in _LINES:
            self._line(op)
        elif op == pickle.PROTO[0]:
            if data[self.at] > pickle.HIGHEST_PROTOCOL:
                raise pickle.UnpicklingError(f"a pickle of protocol {data[self.at]}")
            self.at += 1
        elif op == pickle.FRAME[0]:
            self.at += 8  # how much belongs together, for those who read from a pipe
        else:
            self._refuse(op)

    def _refuse(self, op: int) -> None:
        if op in _LOADS_CODE:
            raise pickle.UnpicklingError("it wants to load code, which no dump needs")
        if op in _FROM_OUTSIDE:
            raise pickle.UnpicklingError("it wants an object from outside, which no dump needs")
        raise pickle.UnpicklingError(f"byte {op:#04x} at {self.at - 1} is no plain data")

    def _whole(self, width: int) -> int:
        number = int.from_bytes(self.data[self.at : self.at + width], "little")
        self.at += width
        return number

    def _block(self, width: int) -> bytes:
        """So many bytes as the *width* bytes before them say."""
        length = self._whole(width)
        if length > len(self.data) - self.at:
            raise pickle.UnpicklingError(f"{length} bytes announced at {self.at}, {len(self.data) - self.at} are there")
        self.at += length
        return self.data[self.at - length : self.at]

    @staticmethod
    def _text(block: bytes) -> str:
        try:
            return block.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise pickle.UnpicklingError("a string that is no UTF-8") from None

    def _line(self, op: int) -> None:
        end = self.data.find(b"\n", self.at, self.at + _LONGEST_LINE)
        if end < 0:
            raise pickle.UnpicklingError(f"a line without an end at {self.at}")
        line, self.at = self.data[self.at : end], end + 1
        try:
            if op == pickle.PUT[0]:
                self.memo[int(line)] = self.stack[-1]
            elif op == pickle.GET[0]:
                self.stack.append(self._known(int(line)))
            elif op == pickle.FLOAT[0]:
                self.stack.append(float(line))
            elif op == pickle.UNICODE[0]:
                self.stack.append(line.decode("raw-unicode-escape"))
            elif op == pickle.STRING[0]:
                self.stack.append(line.strip(b"'\"").decode("latin-1"))
            else:
                plain = {b"00": False, b"01": True}.get(line) if op == pickle.INT[0] else None
                self.stack.append(int(line.rstrip(b"L")) if plain is None else plain)
        except ValueError as error:
            raise pickle.UnpicklingError(str(error)) from None

    def _known(self, number: int) -> Any:
        try:
            return self.memo[number]
        except KeyError:
            raise pickle.UnpicklingError(f"memo {number} is asked for and was never put there") from None

    def _since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def _tuple(self, first: int) -> None:
        if first < 0:
            raise IndexError
        items = tuple(self.stack[first:])
        self.stack[first:] = [items]

    def _list(self) -> list[Any]:
        if not isinstance(self.stack[-1], list):
            raise pickle.UnpicklingError("something is added to what is no list")
        return self.stack[-1]

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise pickle.UnpicklingError("something is put under a key of what is no dictionary")
        for key in items[::2]:
            if type(key) not in _KEYS:
                raise pickle.UnpicklingError(f"a key of type {type(key).__name__}")
        target.update(zip(items[::2], items[1::2], strict=True))
