"""Writes typed data as JSON or MessagePack, and reads it from untrusted sources.

A type is a dataclass, a `msgspec.Struct` or built from such; its annotations are what a file may contain. Nothing that
is read is executed: what does not fit its type is a ValueError of one line. `load_json` remains for documents without
a type.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast

import msgspec

from distsim.text.untrusted_input import MOST, MOST_RANKS, brief, load_json, printable, read_bytes

Integer = Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
"""A whole number that Python prints, not negative."""
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
Number = Annotated[float, msgspec.Meta(ge=-MOST, le=MOST)]
"""A finite number."""

T = TypeVar("T")
_HIDES = re.compile(rb"\\u|[^\n\t -~]")
"""What the text of a JSON document must have for one of its strings to be more than printable ASCII."""


class Unfit(ValueError):
    """Raised for a document that is well-formed and does not fit its type."""


def encode(value: Any) -> bytes:
    """Return *value* as JSON."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half a surrogate pair, as in the name of a file that is not UTF-8
        return json.dumps(msgspec.to_builtins(value, str_keys=True)).encode()


def plain(value: Any) -> Any:
    """Return *value* as JSON data: dictionaries with names as keys, lists, texts and numbers."""
    return msgspec.json.decode(encode(value))


def decode(data: bytes, kind: type[T]) -> T:
    """Return the value of type *kind* that a JSON document contains, with printable texts.

    Raises:
        ValueError: The document does not fit; the message is one line.
    """
    if _HIDES.search(data):
        return convert(load_json(data), kind)
    return cast(T, _checked(lambda: _json(cast("Any", kind)).decode(data)))


def convert(content: Any, kind: type[T]) -> T:
    """Return the value of type *kind* in data without types, as `load_json` returns them. Raises ValueError."""
    return _checked(lambda: msgspec.convert(_printable(content), kind, str_keys=True))


def convert_foreign(content: Any, kind: type[T]) -> T:
    """Return the value of type *kind* in data of another program, which may write a number as text.

    Texts are as they are. Raises ValueError.
    """
    return _checked(lambda: msgspec.convert(content, kind, strict=False, str_keys=True))


def read(path: str | os.PathLike[str], kind: type[T], most: int = 1 << 16) -> T:
    """Return the value of type *kind* in a JSON file of at most *most* bytes. Raises OSError or ValueError."""
    return decode(read_bytes(path, most), kind)


def pack(value: Any, enc_hook: Callable[[Any], Any] | None = None) -> bytes:
    """Return *value* as MessagePack. Values of other types are what *enc_hook* returns for them."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=enc_hook)
    except UnicodeEncodeError:
        content = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=enc_hook)
        return msgspec.msgpack.encode(_printable(content))


def unpack(data: bytes | memoryview, kind: type[T], dec_hook: Callable[[type, Any], Any] | None = None) -> T:
    """Return the value of type *kind* in MessagePack, with texts as they are. Raises ValueError."""
    return cast(T, _checked(lambda: _packed(cast("Any", kind), dec_hook).decode(data)))


def _checked(decoded: Callable[[], T]) -> T:
    try:
        return decoded()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgspec.MsgspecError as error:
        complaint, _, where = str(error).replace("`", "").partition(" - at ")
        where = where.removeprefix("$.")
        complaint = brief(complaint[:1].lower() + complaint[1:], 200)
        kind = Unfit if isinstance(error, msgspec.ValidationError) else ValueError
        raise kind(f"{brief(where)}: {complaint}" if where else complaint) from None


@functools.cache
def _json(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@functools.cache
def _packed(kind: Any, dec_hook: Callable[[type, Any], Any] | None) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=dec_hook)


def _printable(content: Any) -> Any:
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, dict):
        return {_printable(key): _printable(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(map(_printable, content))
    return content
