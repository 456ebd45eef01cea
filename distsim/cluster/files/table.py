"""Classes for the tables of a TOML file, with a check that reports every fault with its path.

The annotations of a class declare the keys of its table. `Table.read` creates an instance from a file's content, or
lists what is wrong. pydantic is not used here because every simulation reads a cluster, and building pydantic's models
took a fifth of a second.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from distsim.errors import UsageError
from distsim.text.untrusted_input import brief, printable

__all__ = ["Bounds", "Length", "Quantity", "Table", "TableKey", "key", "near", "shown"]

Path = tuple[str, ...]
Reader = Callable[[Any, Path, list[str]], Any]
"""Converts a value of a file, or adds to the list of faults; in that case the result is ignored."""
_NEEDED: Any = object()
_TRUE = ("true", "t", "yes", "y", "on", "1")
_FALSE = ("false", "f", "no", "n", "off", "0")


class Bounds:
    """Bounds of a number."""

    def __init__(self, **limits: float) -> None:
        self.limits = limits

    def broken_by(self, value: float) -> str | None:
        for name, (limit, holds) in _LIMITS.items():
            if name in self.limits and not holds(value, self.limits[name]):
                return f"expected {limit} {self.limits[name]}"
        return None


_LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "le": ("less than or equal to", lambda value, limit: value <= limit),
    "ge": ("greater than or equal to", lambda value, limit: value >= limit),
    "gt": ("greater than", lambda value, limit: value > limit),
}


class Length:
    """Bounds on the length of a list."""

    def __init__(self, most: int) -> None:
        self.most = most


class Quantity:
    """A number that a file may write with its unit; *unit* is the unit in which it is written back."""

    def __init__(self, parse: Callable[[Any], float], unit: str) -> None:
        self.parse, self.unit = parse, unit


class TableKey:
    """One key of a table."""

    def __init__(self, text: str, default: Any = _NEEDED) -> None:
        self.text, self.default = text, default
        self.annotation: Any = None

    @property
    def unit(self) -> str:
        """Return the unit of a quantity, which a file may omit."""
        marks = [*getattr(self.annotation, "__metadata__", ())]
        marks += [mark for option in get_args(self.annotation) for mark in getattr(option, "__metadata__", ())]
        return next((mark.unit for mark in marks if isinstance(mark, Quantity)), "")


def key(text: str, default: Any = _NEEDED) -> Any:
    """Declare a key of a table with its explanation and its default."""
    return TableKey(text, default)


class Table:
    """A table of a file. Unknown keys are faults, and instances are immutable."""

    _keys: ClassVar[dict[str, TableKey]]

    def __init__(self, **values: Any) -> None:
        for name, known in self.keys().items():
            default = dict(known.default) if isinstance(known.default, dict) else known.default
            vars(self)[name] = values.get(name, default)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name}: nothing changes in a table that was read")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @classmethod
    def keys(cls) -> dict[str, TableKey]:
        """Return the keys by name, inherited ones first."""
        if "_keys" not in vars(cls):
            cls._keys = {}
            hints = typing.get_type_hints(cls, include_extras=True)
            for name, annotation in hints.items():
                if get_origin(annotation) is ClassVar:
                    continue
                given = getattr(cls, name, _NEEDED)
                known = TableKey(given.text, given.default) if isinstance(given, TableKey) else TableKey("", given)
                known.annotation = annotation
                cls._keys[name] = known
        return cls._keys

    @classmethod
    def read(cls, data: Any, path: Path, faults: list[str]) -> Any:
        """Create the table that *data* describes, and append what is wrong to *faults*."""
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            return _wrong(path, f"expected a table, got {shown(data)}", faults)
        values: dict[str, Any] = {}
        keys = cls.keys()
        for name, known in keys.items():
            if name in data:
                values[name] = reader(known.annotation)(data[name], (*path, name), faults)
            elif known.default is _NEEDED:
                _wrong((*path, name), "expected a value, got nothing", faults)
        for name in data:
            if name not in keys:
                _wrong((*path, name), f"unknown key (expected one of {', '.join(keys)}){near(name, keys)}", faults)
        return cls(**values)


def shown(given: Any) -> str:
    return repr(brief(given)) if isinstance(given, str) else brief(given)


def _wrong(path: Path, text: str, faults: list[str]) -> None:
    faults.append(f"{'.'.join(brief(str(part)) for part in path)}: {text}")


def _unlike(path: Path, expected: str, given: Any, faults: list[str]) -> None:
    _wrong(path, f"{expected}, got {shown(given)} ({type(given).__name__})", faults)


def near(given: Any, options: Any) -> str:
    """Return a hint that names the known word most similar to a mistyped one."""
    import difflib

    close = difflib.get_close_matches(brief(given), list(options), 1)
    return f"; did you mean '{close[0]}'?" if close else ""


@functools.cache
def reader(annotation: Any) -> Reader:
    """Return the function that checks a value against *annotation*."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _marked(inside[0], inside[1:])
    if origin in (Union, types.UnionType):
        options = [option for option in inside if option is not type(None)]
        return _optional(reader(options[0])) if len(options) == 1 else _one_kind_of(options)
    if origin is Literal:
        return _choice(inside)
    if origin is dict:
        return _entries(reader(inside[0]), reader(inside[1]))
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return annotation.read
    return {str: _text, float: _number(None), bool: _flag}[annotation]


def _marked(base: Any, marks: tuple[Any, ...]) -> Reader:
    for mark in marks:
        if isinstance(mark, Quantity):
            return _quantity(mark.parse)
        if isinstance(mark, Length):
            return _list(reader(get_args(base)[0]), mark.most)
        if isinstance(mark, Bounds):
            return _integer(mark) if base is int else _number(mark)
    raise TypeError(f"no reader for {base} with {marks}")


def _optional(inside: Reader) -> Reader:
    return lambda given, path, faults: None if given is None else inside(given, path, faults)


def _quantity(parse: Callable[[Any], float]) -> Reader:
    def read(given: Any, path: Path, faults: list[str]) -> Any:
        try:
            return parse(given)
        except UsageError as error:
            return _wrong(path, str(error), faults)

    return read


def _integer(bounds: Bounds) -> Reader:
    def read(given: Any, path: Path, faults: list[str]) -> Any:
        if isinstance(given, bool) or not isinstance(given, int):
            return _unlike(path, "expected an integer", given, faults)
        if (broken := bounds.broken_by(given)) is not None:
            return _unlike(path, broken, given, faults)
        return given

    return read


def _number(bounds: Bounds | None) -> Reader:
    def read(given: Any, path: Path, faults: list[str]) -> Any:
        if not isinstance(given, int | float | str):
            return _unlike(path, "expected a number", given, faults)
        try:
            value = float(given if not isinstance(given, str) or given.isascii() else "")
        except OverflowError:
            return _unlike(path, "expected a number", given, faults)
        except ValueError:
            return _unlike(path, "expected a number, unable to parse string as a number", given, faults)
        if not math.isfinite(value):
            return _unlike(path, "expected a finite number", given, faults)
        if bounds is not None and (broken := bounds.broken_by(value)) is not None:
            return _unlike(path, broken, given, faults)
        return value

    return read


def _flag(given: Any, path: Path, faults: list[str]) -> Any:
    """Read a boolean, also written as yes/no, on/off or 1/0."""
    if isinstance(given, bool):
        return given
    whole = isinstance(given, int | float) and abs(given) < 1 << 63 and given == int(given)
    if not (whole or isinstance(given, str)):
        return _unlike(path, "expected a boolean", given, faults)
    word = str(int(given)) if whole else given.lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    return _unlike(path, "expected a boolean, unable to interpret input", given, faults)


def _text(given: Any, path: Path, faults: list[str]) -> Any:
    """Return a name or description with escape sequences made visible, because it is printed."""
    return printable(given) if isinstance(given, str) else _unlike(path, "expected a string", given, faults)


def _choice(options: tuple[str, ...]) -> Reader:
    quoted = [f"'{option}'" for option in options]
    expected = f"expected {' or '.join(filter(None, (', '.join(quoted[:-1]), quoted[-1])))}"

    def read(given: Any, path: Path, faults: list[str]) -> Any:
        return given if isinstance(given, str) and given in options else _unlike(path, expected, given, faults)

    return read


def _list(entry: Reader, most: int) -> Reader:
    def read(given: Any, path: Path, faults: list[str]) -> Any:
        if not isinstance(given, list | tuple):
            return _unlike(path, "expected a list", given, faults)
        if not given:
            text = "expected a list that should have at least 1 item after validation, not 0"
            return _unlike(path, text, given, faults)
        if len(given) > most:
            text = f"expected a list that should have at most {most} items after validation, not {len(given)}"
            return _unlike(path, text, given, faults)
        return [entry(value, (*path, str(number)), faults) for number, value in enumerate(given)]

    return read


def _entries(name: Reader, entry: Reader) -> Reader:
    def read(given: Any, path: Path, faults: list[str]) -> Any:
        if not isinstance(given, Mapping):
            return _wrong(path, f"expected a table, got {shown(given)}", faults)
        result: dict[str, Any] = {}
        for each, value in given.items():
            wrong: list[str] = []
            name(each, (), wrong)
            faults.extend(f"{'.'.join(brief(part) for part in path)}: a key{text}" for text in wrong)
            result[each] = entry(value, (*path, str(each)), faults)
        return result

    return read


def _one_kind_of(tables: list[type[Table]]) -> Reader:
    """Return a reader for one of several tables, which its key `kind` selects."""
    kinds = {get_args(table.keys()["kind"].annotation)[0]: table for table in tables}

    def read(given: Any, path: Path, faults: list[str]) -> Any:
        if isinstance(given, Table):
            return given
        if not isinstance(given, Mapping):
            return _wrong(path, f"expected a table, got {shown(given)}", faults)
        kind = given.get("kind")
        if not isinstance(kind, str) or kind not in kinds:
            expected = f"expected one of {', '.join(kinds)}, got {shown(kind)}{near(kind, kinds)}"
            return _wrong((*path, "kind"), expected, faults)
        return kinds[kind].read(given, path, faults)

    return read
