"""The `[[faults]]` of a scenario file: the table of each fault, derived from its rule in the simulator.

A rule is a dataclass in `distsim/sim/faults`; its `what` is the fault's name. Its fields are the keys of the table,
with their types, bounds and defaults; a field whose name ends in `_s` is a time, which a file may write with a unit.
The docstrings of class and fields are the descriptions of the JSON schema.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import pkgutil
import textwrap
import typing
from collections.abc import Iterator
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from annotated_types import Ge, Gt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from distsim.errors import UsageError
from distsim.sim import faults
from distsim.sim.faults.fault import CallPoint, Rule, When
from distsim.text.units import parse_time

__all__ = ["FAULT_TABLES", "FaultSpec", "FaultTable", "FileTable", "Rank", "Seconds", "quantity", "table_of"]


def _seconds(value: Any) -> float:
    if isinstance(value, bool):
        raise PydanticCustomError("quantity", "expected a time such as 0.5 (seconds) or '5ms', got a boolean")
    try:
        return parse_time(value)
    except (UsageError, TypeError) as error:
        raise PydanticCustomError("quantity", "{text}", {"text": str(error)}) from None


def _call(value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PydanticCustomError("call", "expected a call such as 'all_reduce #3' or a number")
    try:
        CallPoint.parse(value)
    except UsageError as error:
        raise PydanticCustomError("call", "{text}", {"text": str(error)}) from None
    return value


def quantity(example: str, **number: float) -> WithJsonSchema:
    """The JSON schema of a quantity: a number, or text with a unit as in *example*."""
    return WithJsonSchema({"anyOf": [{"type": "number", **number}, {"type": "string", "examples": [example]}]})


Seconds = Annotated[float, BeforeValidator(_seconds), Ge(0), quantity("5ms", minimum=0)]
"""Virtual time: a number of seconds, or text such as "5ms"."""
MoreSeconds = Annotated[float, BeforeValidator(_seconds), Gt(0), quantity("5ms", exclusiveMinimum=0)]
"""Seconds above zero."""
Rank = Annotated[int, Ge(0), Strict()]


class FileTable(BaseModel):
    """A table of the file. It refuses unknown keys and does not change once it is checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FaultTable(FileTable):
    """Base class of the tables of all faults."""

    rule_class: ClassVar[type[Rule]]
    what: str

    def rule(self, path: str) -> Rule:
        """Return the simulator's rule for this table, whose path in the file is *path*."""
        values = {name: getattr(self, name) for name in type(self).model_fields if name != "what"}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        moment = {name: values.pop(name) for name in _fields(When)}
        if moment["call"] is not None:
            moment["call"] = CallPoint.parse(moment["call"])
        return self.rule_class(path=path, when=When(**moment), **values)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> FaultTable:
        try:
            self.rule("")
        except UsageError as error:
            raise PydanticCustomError("rule", "{text}", {"text": str(error)}) from None
        return self


def _rules() -> Iterator[tuple[str, type[Rule]]]:
    """Every fault by its name, with its rule."""
    for module in pkgutil.iter_modules(faults.__path__, f"{faults.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            own = isinstance(value, type) and value.__module__ == module.name
            if own and issubclass(value, Rule) and not inspect.isabstract(value):
                yield value.what, value


def table_of(fault: str, rule: type[Rule]) -> type[FaultTable]:
    """The table of the fault *fault*, whose fields are those of *rule* and of its moment."""
    keys: dict[str, Any] = {"what": (Literal[fault], ...)}
    for owner in (When, rule):
        hints = typing.get_type_hints(owner, include_extras=True)
        texts = _descriptions(owner)
        for name, field in _fields(owner).items():
            default = ... if field.default is dataclasses.MISSING else field.default
            keys[name] = (_written(name, hints[name]), Field(default, description=texts[name]))
    table = create_model(rule.__name__, __base__=FaultTable, __doc__=rule.__doc__, **keys)
    table.rule_class = rule
    return table


def _fields(owner: type[Rule | When]) -> dict[str, dataclasses.Field[Any]]:
    """The fields that a user writes."""
    return {field.name: field for field in dataclasses.fields(owner) if field.name not in ("path", "when")}


def _written(name: str, hint: Any) -> Any:
    """The type of a key of the file, for the type *hint* of a rule's field."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated and args[0] is float and name.endswith("_s"):
        return MoreSeconds if Gt(0) in args else Seconds
    if origin is Annotated:
        return Annotated[_written(name, args[0]), *args[1:]]
    if origin in (Union, UnionType):
        return Union[tuple(_written(name, arg) for arg in args)]  # noqa: UP007 - made of a tuple
    if origin is tuple:
        return list[_written(name, args[0])]  # type: ignore[misc]
    if hint is CallPoint:
        return Annotated[str | int, BeforeValidator(_call)]
    return Annotated[int, Strict()] if hint is int else hint


def _descriptions(owner: type) -> dict[str, str]:
    """The docstring of each field of *owner* and its bases, without capital letter and full stop."""
    texts: dict[str, str] = {}
    for cls in reversed(owner.__mro__[:-1]):
        if not dataclasses.is_dataclass(cls):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                written = inspect.cleandoc(str(text.value.value))
                texts[ast.unparse(field.target)] = written[0].lower() + written[1:].removesuffix(".")
    return texts


FAULT_TABLES = {what: table_of(what, rule) for what, rule in sorted(_rules())}
"""The table of each fault, by its `what`."""
if TYPE_CHECKING:
    FaultSpec = FaultTable
else:
    FaultSpec = Annotated[Union[tuple(FAULT_TABLES.values())], Field(discriminator="what")]  # noqa: UP007
