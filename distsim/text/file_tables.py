"""Tables of files that people write, as pydantic's models, and complaints about such a file in one line each."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticUndefined

from distsim.errors import UsageError
from distsim.text.units import parse_bandwidth, parse_flops, parse_memory, parse_time
from distsim.text.untrusted_input import brief, printable


class FileTable(BaseModel):
    """A table of a file. It refuses unknown keys and does not change once it is checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    def replaced(self, **values: Any) -> Self:
        """Return a table in which *values*, which are not checked, replace those of the same keys."""
        return self.model_copy(update=values)


def key(text: str, default: Any = PydanticUndefined) -> Any:
    """Declare a key of a table with its explanation and its default."""
    return Field(default, description=text)


@dataclass(frozen=True)
class Unit:
    """Marks a quantity with the unit in which it is written back."""

    name: str


def in_our_words(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return *parse* with its `UsageError` as a complaint that pydantic collects."""

    def parsed(value: Any) -> Any:
        try:
            return parse(value)
        except UsageError as error:
            raise PydanticCustomError("words", "{text}", {"text": str(error)}) from None

    return parsed


def quantity(example: str, **number: float) -> WithJsonSchema:
    """Return the JSON schema of a quantity: a number, or text with a unit as in *example*."""
    return WithJsonSchema({"anyOf": [{"type": "number", **number}, {"type": "string", "examples": [example]}]})


Bandwidth = Annotated[
    float, BeforeValidator(in_our_words(parse_bandwidth)), Unit("GBps"), quantity("300GB/s", exclusiveMinimum=0)
]
Flops = Annotated[
    float, BeforeValidator(in_our_words(parse_flops)), Unit("TFLOPS"), quantity("989TFLOPS", exclusiveMinimum=0)
]
Memory = Annotated[int, BeforeValidator(in_our_words(parse_memory)), Unit("GB"), quantity("512MiB", exclusiveMinimum=0)]
Time = Annotated[float, BeforeValidator(in_our_words(parse_time)), Unit("us"), quantity("5ms", minimum=0)]
Integer = Annotated[int, Field(strict=True)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Text = Annotated[str, AfterValidator(printable)]
"""A name or description, with escape sequences made visible because it is printed."""
Dtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]


def unit_of(field: FieldInfo) -> str:
    """Return the unit of a quantity, which a file may omit; empty for other keys."""
    marks = [
        *field.metadata,
        *(m for option in get_args(field.annotation) for m in getattr(option, "__metadata__", ())),
    ]
    return next((mark.name for mark in marks if isinstance(mark, Unit)), "")


def tables_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the tables that a value of this type may be or hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation) if get_origin(annotation) is not Literal else ():
        yield from tables_in(inner)


def shown(given: Any) -> str:
    """Return a value for a message, text in quotes."""
    return repr(brief(given)) if isinstance(given, str) else brief(given)


def near(given: Any, options: Any) -> str:
    """Return a hint that names the known word most similar to a mistyped one."""
    close = difflib.get_close_matches(brief(given), list(options), 1)
    return f"; did you mean '{close[0]}'?" if close else ""


def complaints(error: ValidationError, root: Any, path: str = "") -> list[str]:
    """Return what is wrong with a file, one line each: `path: expected ..., got ...`.

    Args:
        error: pydantic's complaints.
        root: type that was validated.
        path: where in the file the value is.
    """
    return [_complaint(detail, root, path) for detail in error.errors(include_url=False)]


def _complaint(detail: Mapping[str, Any], root: Any, path: str) -> str:
    tables, kind = list(tables_in(root)), detail["type"]
    for part in detail["loc"]:
        field = _keys(tables[0]).get(str(part)) if len(tables) == 1 else None
        tagged = [table for table in tables if part in _tags(table)] if len(tables) > 1 else []
        if isinstance(part, int):
            path += f"[{part}]"
        elif tagged:
            tables = tagged
        elif field is not None or kind == "extra_forbidden" or not _is_pydantics(str(part)):
            path += f".{brief(str(part))}" if path else brief(str(part))
            tables = list(tables_in(field.annotation)) if field is not None else tables
    given = detail["input"]
    match kind:
        case "missing":
            return f"{path}: expected a value, got nothing"
        case "extra_forbidden":
            known = [name for name, field in _keys(tables[0]).items() if not _tag(field)]
            return f"{path}: unknown key (expected one of {', '.join(known)}){near(detail['loc'][-1], known)}"
        case "union_tag_invalid" | "union_tag_not_found":
            return _untagged(given, detail["ctx"]["discriminator"].strip("'"), tables, path)
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{path}: expected a table, got {shown(given)}"
    if "text" in detail.get("ctx", {}):
        return f"{path}: {detail['ctx']['text']}"
    expected = str(detail["msg"])
    for before, after in _WORDS.items():
        expected = expected.replace(before, after)
    return f"{path}: {expected}" + (f", got {shown(given)} ({type(given).__name__})" if "got" not in expected else "")


_WORDS = {
    "Input should be": "expected",
    "List should": "expected a list that should",
    "String should": "expected a text that should",
    "Value error, ": "",
    "a valid ": "a ",
    "a integer": "an integer",
}
"""Beginnings of pydantic's messages, and ours."""


def _untagged(given: Any, tag: str, tables: list[type[BaseModel]], path: str) -> str:
    """Return the complaint about a table of one of several kinds, whose key *tag* does not say which."""
    tags = [name for table in tables for name in _tags(table)]
    if tag in given:
        return f"{path}.{tag}: expected one of {', '.join(tags)}, got {shown(given[tag])}{near(given[tag], tags)}"
    known = {name for table in tables for name in _keys(table)}
    wrong = next((f".{brief(str(name))}: unknown key;" for name in given if name not in known), ":")
    return f"{path}{wrong} expected the key {tag}, which is one of {', '.join(tags)}"


def _keys(table: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the keys of a table as a file writes them."""
    return {field.alias or name: field for name, field in table.model_fields.items()}


def _tags(table: type[BaseModel]) -> tuple[Any, ...]:
    """Return the values of the key that tells a table from the others that may stand in its place."""
    return next(filter(None, map(_tag, table.model_fields.values())), ())


def _tag(field: FieldInfo) -> tuple[Any, ...]:
    """Return the one value that a key may have; empty for other keys."""
    options = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return options if len(options) == 1 else ()


def _is_pydantics(part: str) -> bool:
    """Return whether a part of a location is the name of a type in a union, or a mark, and not a key."""
    return part in ("str", "int", "list[str]", "function-before", "[key]") or "(" in part or part.startswith("list[")
