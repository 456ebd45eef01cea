"""Files made wrong: bytes changed anywhere, values exchanged for strange ones, structures nested, cut and doubled."""

from __future__ import annotations

import json
import os
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["SPOILED", "mutated"]

STRANGE = (
    "null", "true", "[]", "{}", "-1", "0", "1", "3", "1e999", "-1e308", "5e-324", "nan", "NaN", "inf", "Infinity",
    "99999999999999999999", "9" * 5000, "1" + "0" * 400, "0x7fffffff", "2147483648", "9223372036854775808",
    '""', '"x"', '"../../../etc/passwd"', '"\\u001b]0;owned\\u0007\\u202e"', '"[bold red]x[/"', '"\\ud800"', '"5us"',
    '"100GBps"', '"1e400GBps"', '"0Gbps"', '"\\u0000"', '[[1]]', '[1, 2, 3]', '[-1]', '{"a": 1}', '{"kind": "torus"}',
    "[" * 60 + "]" * 60, "[" * 3000, '{"a":' * 2000, '"' + "y" * 30000 + '"', "1979-05-27T07:32:00Z", "'", '"',
    "\x1b[2J",
    "\u202e", "é", "&lol;", "*anchor", "- x", "!!python/object:os.system", "=1+1", ",", ",,,,", "\n\n", "#", "\\",
)  # fmt: skip
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
VALUE = re.compile(rb'"[^"\n]{0,200}"|-?\d+(?:\.\d+)?|\btrue\b|\bfalse\b|\bnull\b|\[[^\[\]\n]{0,200}\]')
WORD = re.compile(rb"[A-Za-z_][\w.-]*")
EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """*data* with one to six things wrong in it; now and then it is not of this kind at all."""
    if chance.random() < 0.01:
        return chance.choice((b"", b"\0" * 100, chance.randbytes(200), b"\xff\xfe", b"[" * 100_000, b"{}", b"null"))
    binary = b"\0" in data[:4096] or data[:1] == b"\x80"
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 6))):
        data = (_binary if binary and chance.random() < 0.7 else _textual)(data, chance)
        if len(data) > 1 << 21:
            data = data[: 1 << 21]
    return data


def _spot(data: bytes, chance: random.Random) -> int:
    """Anywhere; the first kilobyte holds what counts in a binary file."""
    return chance.randrange(min(len(data), chance.choice((64, 1024, len(data) or 1))) or 1) if data else 0


def _binary(data: bytes, chance: random.Random) -> bytes:
    at = _spot(data, chance)
    held = [
        place for place in (chance.randrange(len(data) or 1) for _ in range(40)) if data[place : place + 1] != b"\0"
    ]
    at = chance.choice(held) if held and chance.random() < 0.6 else at
    match chance.randrange(5):
        case 0:
            return data[:at] + chance.randbytes(1) + data[at + 1 :]
        case 1:
            width, code = chance.choice(((4, "<I"), (8, "<Q")))
            at -= at % width
            value = chance.choice(EDGES) & ((1 << 8 * width) - 1)
            return data[:at] + struct.pack(code, value) + data[at + width :]
        case 2:
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :] if data else data
        case 3:
            return data[:at] if chance.random() < 0.3 else data[:at] + chance.randbytes(8) + data[at + 8 :]
        case _:
            other = _spot(data, chance)
            return data[:at] + data[other : other + 16] + data[at + 16 :]


def _textual(data: bytes, chance: random.Random) -> bytes:
    strange = chance.choice(STRANGE).encode("utf-8", "surrogatepass")
    match chance.randrange(10):
        case 0 | 1 | 2 | 3:
            return _exchanged(data, VALUE, strange, chance)
        case 4:
            number = chance.choice(
                (str(chance.choice(EDGES)), str(-chance.choice(EDGES)), repr(chance.expovariate(1e-9)))
            )
            return _exchanged(data, NUMBER, number.encode(), chance)
        case 5:
            words = WORD.findall(data[:20000])
            return _exchanged(data, WORD, chance.choice(words) if words and chance.random() < 0.7 else strange, chance)
        case 6:
            at = chance.randrange(len(data) + 1)
            return data[:at] + strange + data[at:]
        case 7:
            lines = data.split(b"\n")
            one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
            if chance.random() < 0.5:
                lines.insert(other, lines[one])
            else:
                del lines[one]
            return b"\n".join(lines)
        case 8:
            at = chance.randrange(len(data) + 1)
            return data[:at] if chance.random() < 0.3 else data[:at] + data[at + chance.randrange(1, 40) :]
        case _:
            return _structure(data, chance)


def _exchanged(data: bytes, what: re.Pattern[bytes], by: bytes, chance: random.Random) -> bytes:
    found = list(what.finditer(data, 0, 200_000))
    if not found:
        return data + by
    one = chance.choice(found)
    return data[: one.start()] + by + data[one.end() :]


def _structure(data: bytes, chance: random.Random) -> bytes:
    """One value of a JSON document, at any depth, replaced, removed or nested; other files lose a byte."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        at = _spot(data, chance)
        return data[:at] + data[at + 1 :]
    places = []
    level = [document]
    while level and len(places) < 2000:
        level = [one for one in level if one and isinstance(one, dict | list)]
        places += level
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    if not places:
        return b"[" + data + b"]"
    table = chance.choice(places)
    key = chance.choice(list(table)) if isinstance(table, dict) else chance.randrange(len(table))
    try:
        value = json.loads(chance.choice(STRANGE))
    except (ValueError, RecursionError):
        value = chance.choice((None, True, -1, 1e308, "x" * 5000, [[]], {"a": {}}, 10**30))
    if chance.random() < 0.2:
        del table[key]
    elif chance.random() < 0.2:
        table[key] = [table[key]]
    else:
        table[key] = value
    return json.dumps(document).encode()


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


SPOILED: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "of 3 GiB": _sparse,
    "zeros": lambda path: path.write_bytes(b"\0" * 65536),
    "one long line": lambda path: path.write_bytes(b"x" * 200_000),
}
"""What else can be under the name of a file."""
