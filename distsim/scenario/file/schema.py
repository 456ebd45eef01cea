"""Schema of a scenario file: a program, its cluster, its faults, and its expectations.

The table of a fault is made from its rule (`sim/faults`), and the JSON schema for editors from all of it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import json
import pkgutil
import textwrap
import typing
from collections.abc import Iterator
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from annotated_types import Ge, Gt
from pydantic import (
    BeforeValidator,
    Field,
    Strict,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from distsim.debug.diagnosis.silent.facts import SilentKind
from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError
from distsim.options import Data, Fidelity, Silent, default_of, meaning
from distsim.sim import faults
from distsim.sim.faults.fault import CallPoint, Rule, When
from distsim.text.file_tables import Bandwidth, FileTable, Memory, Time, in_our_words, quantity, shown
from distsim.text.units import parse_time


@in_our_words
def _call(value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UsageError(f"expected a call such as 'all_reduce #3' or a number, got {shown(value)}")
    CallPoint.parse(value)
    return value


Seconds = Annotated[Time, Ge(0)]
"""Virtual time: a number of seconds, or text such as "5ms"."""
MoreSeconds = Annotated[float, BeforeValidator(in_our_words(parse_time)), Gt(0), quantity("5ms", exclusiveMinimum=0)]
"""Seconds above zero."""
Rank = Annotated[int, Ge(0), Strict()]


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
    """Yield every fault by its name, with its rule."""
    for module in pkgutil.iter_modules(faults.__path__, f"{faults.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            own = isinstance(value, type) and value.__module__ == module.name
            if own and issubclass(value, Rule) and hasattr(value, "what"):
                yield value.what, value


def table_of(fault: str, rule: type[Rule]) -> type[FaultTable]:
    """Return the table of the fault *fault*, whose fields are those of *rule* and of its moment."""
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
    """Return the fields that a user writes."""
    return {field.name: field for field in dataclasses.fields(owner) if field.name not in ("path", "when")}


def _written(name: str, hint: Any) -> Any:
    """Return the type of a key of the file, for the type *hint* of a rule's field."""
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
    """Return the docstring of each field of *owner* and its bases, without capital letter and full stop."""
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


KINDS = tuple(kind.value for kind in Kind)
SILENT_KINDS = ("none", *(kind.value for kind in SilentKind))


Count = Annotated[int, Field(ge=1, strict=True)]
RankOrAll = Annotated[str, Field(pattern=r"^(all|[0-9]{1,9})$")]


def _option(name: str) -> Any:
    return Field(default_of(name), description=meaning(name))


class CallSpec(FileTable):
    """A call as reports name it: `all_reduce #3`."""

    op: str | None = Field(None, description="the operation: all_reduce, send, ...")
    seq: Count | None = Field(None, description="its number in its group, from 1: the 3 of all_reduce #3")


class StepTimeSpec(FileTable):
    """Limits on the time of a step, compared with the time in the baseline."""

    band: Annotated[float, Field(gt=0, lt=1)] = Field(0.05, description="how much it may differ, as a fraction")
    line: str | None = Field(
        None, description="marker of a call made once a step; without it the step is the report's, of training on GPUs"
    )


class LimitsSpec(FileTable):
    """Limits after which a program is ended."""

    virtual_time_s: Seconds | None = Field(86_400.0, description="virtual time (default: a day)")
    wall_time_s: Annotated[float, Field(gt=0)] = Field(60.0, description="of this machine's time")
    events: Count | None = Field(20_000_000, description="simulated events")
    host_timeout_s: Annotated[float, Field(gt=0)] = Field(
        30.0, description="wall time after which a rank that computes without a call is stuck"
    )


class ExpectSpec(FileTable):
    """Expected outcome. Every given key is checked."""

    kind: Literal[KINDS] = Field(  # type: ignore[valid-type]
        "healthy",
        description="of the first diagnosis; healthy: exit code 0 and nothing but stragglers to say",
    )
    failing_orders: bool = Field(
        False, description="with explore: the scenario passes if it fails under some order of operations"
    )
    culprits: list[Rank] | None = Field(None, description="the ranks at fault, ascending")
    victims: list[Rank] | None = Field(None, description="the ranks that wait for them, ascending")
    group: str | None = Field(None, description="description or name of the group")
    call: CallSpec | None = Field(None, description="the call that the diagnosis is about")
    cycle: list[Rank] | None = Field(None, description="the ranks of a circle of waits, in its order")
    pair: Annotated[list[Rank], Field(min_length=2, max_length=2)] | None = Field(
        None, description="sender and receiver"
    )
    line: str | None = Field(
        None, description="a culprit is at a line of the program that ends like this ('# <- culprit')"
    )
    stuck_line: str | None = Field(None, description="a waiting rank is at a line that ends with this text")
    explanation: str | None = Field(None, description="a part of the explanation")
    exit_code: Annotated[int, Field(ge=0, le=255, strict=True)] | None = Field(
        None, description="0 finished, 1 raised, 3 hang, 4 inconsistent calls"
    )
    output: list[str] | None = Field(None, description="lines that some rank prints, in any order")
    prints: dict[RankOrAll, list[str]] | None = Field(None, description="rank or all: lines it prints, in this order")
    results: dict[RankOrAll, Any] | None = Field(None, description="rank or all: what the function returned")
    step_time: StepTimeSpec | None = Field(None, description="the time of a step, against the stored baseline")
    virtual_time_below_s: Seconds | None = Field(None, description="the whole run takes less virtual time")
    memory_below: Memory | None = Field(
        None,
        description="'512MiB' or bytes: the most that the storages of one rank's CPU tensors take together; each "
        "counts once however many views it has, whole (also what a slice keeps alive), from the first operator that "
        "meets it until it is freed. Parameters, gradients, activations, optimizer states and DDP's and FSDP's "
        "buffers count; scratch space inside operators, NumPy arrays and other Python objects do not. "
        "What only waits for Python's garbage collector adds a sixteenth at most",
    )
    busbw_above: dict[str, Bandwidth] | None = Field(None, description="operation: bus bandwidth, as '300GB/s'")
    utilisation_below: dict[str, Annotated[float, Field(gt=0, le=1)]] | None = Field(
        None, description="pattern of links: fraction of their bandwidth, on average over the run"
    )

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers_as_ranks(cls, data: Any) -> Any:
        """Convert integer keys to text: keys of TOML are always text, but a table from Python may have integers."""
        if isinstance(data, dict):
            for key in ("prints", "results"):
                if isinstance(data.get(key), dict):
                    data = {**data, key: {str(rank): value for rank, value in data[key].items()}}
        return data


class ScenarioSpec(FileTable):
    """One scenario."""

    schema_: Literal["distsim.scenario/1"] = Field(
        "distsim.scenario/1", alias="schema", description="the version of this format; it grows by new keys only"
    )
    teaches: str | None = Field(None, description="one sentence for the index")
    program: Annotated[str, Field(min_length=1)] = Field(
        description="script.py beside the file, script.py:function or module:function"
    )
    args: list[str] = Field(default_factory=list, description="the script's, or the function's")
    env: dict[str, str] = Field(default_factory=dict, description="environment variables of every rank")
    on: str = Field(default_of("on"), description="a cluster: preset:nodes, or a cluster file beside this one")
    nnodes: Count | None = _option("nnodes")
    nproc_per_node: Count | None = _option("nproc_per_node")
    backend: Literal["sim", "gloo"] = Field("sim", description="simulated, or for real on gloo")
    seed: Annotated[int, Field(ge=0, strict=True)] = _option("seed")
    explore: str | Annotated[int, Field(ge=1, strict=True)] | None = Field(
        None, description="orders of operations to try: 'all', a number of runs, or a time such as '60s'"
    )
    explore_faults: list[Literal["kill", "store-loss", "timeout", "buffered"]] = Field(
        default_factory=list,
        description="what else to try: before each call of a rank it dies or its store is lost, limits strike early, "
        "sends return early",
    )
    expect_fault: Literal["error"] | None = Field(
        None, description="with explore_faults: after a fault, a rank that goes on must fail"
    )
    data: Data = _option("data")
    placeholder: float = _option("placeholder")
    routing: str = _option("routing")
    lengths: str | None = _option("lengths")
    fuse: bool = _option("fuse")
    strict_kernels: bool = _option("strict_kernels")
    gpu_libraries: str | None = _option("gpu_libraries")
    silent: Silent | None = _option("silent")
    silent_allow: list[str] = Field(
        default_factory=list, description="KIND:TENSOR of silent findings that are known to be right"
    )
    expect_silent: Literal[SILENT_KINDS] | list[Literal[SILENT_KINDS]] | None = Field(  # type: ignore[valid-type]
        None,
        description="the kinds of silent findings, errors and warnings, that the run reports, or 'none' (default: not "
        "checked; an error is exit code 5 with silent = 'strict')",
    )
    fidelity: Fidelity = _option("fidelity")
    algo: str | None = _option("algo")
    proto: str | None = _option("proto")
    guards: list[Literal["nan", "buffers", "payloads"]] = Field(
        default_factory=list,
        description="look for NaN in inputs, for buffers written to while in flight, for corrupted payloads",
    )
    slow: bool = Field(False, description="takes over two seconds (deselect with -k 'not slow')")
    faults: list[FaultSpec] = Field(default_factory=list, description="what goes wrong, where, when, for how long")
    limits: LimitsSpec = Field(LimitsSpec.model_validate({}), description=LimitsSpec.__doc__)
    expect: ExpectSpec = Field(ExpectSpec.model_validate({}), description=ExpectSpec.__doc__)


ID = "urn:distsim:schema:scenario:1"
"""Identifier of the schema: absolute, but not an address from which anything is loaded."""


def json_schema() -> str:
    """Return the schema as JSON."""
    model_schema = ScenarioSpec.model_json_schema()
    schema = _plain(model_schema, model_schema["$defs"])
    schema |= {"$schema": "http://json-schema.org/draft-07/schema#", "$id": ID, "title": "A scenario of distsim"}
    return json.dumps(schema, indent=1, sort_keys=True)


def _plain(node: Any, tables: dict[str, Any]) -> Any:
    """Return *node* with references resolved, and without titles and null."""
    if isinstance(node, list):
        return [_plain(one, tables) for one in node]
    if not isinstance(node, dict):
        return node
    if "discriminator" in node:
        return _fault(node["discriminator"], tables)
    node = dict(node)
    if "$ref" in node:
        node = {**tables[node.pop("$ref").rpartition("/")[2]], **node}
    choices = [choice for choice in node.get("anyOf", ()) if choice != {"type": "null"}]
    if len(choices) == 1:
        del node["anyOf"]
        return _plain({**choices[0], **node}, tables)
    if choices:
        node["anyOf"] = choices
    table = node.get("type") == "object" and "properties" in node
    if node.get("default", ...) is None or table:  # a table's default is those of its keys
        node.pop("default", None)
    if isinstance(node.get("description"), str):
        node["description"] = " ".join(node["description"].split())
    plain = {}
    for key, value in node.items():
        if key in ("properties", "patternProperties"):
            plain[key] = {name: _plain(one, tables) for name, one in value.items()}
        elif key != "$defs" and not (key == "title" and isinstance(value, str)):
            plain[key] = value if key in ("default", "examples", "required", "enum") else _plain(value, tables)
    return plain


def _fault(discriminator: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    """Return a fault, validated by the table that its key `what` names."""
    whats = {name: _plain({"$ref": ref}, tables) for name, ref in discriminator["mapping"].items()}
    name_schema = {"description": "what goes wrong", "enum": list(whats), "type": "string"}
    then = []
    for name, table in whats.items():
        table["properties"]["what"]["description"] = table["description"]
        condition = {"type": "object", "properties": {"what": {"const": name}}, "required": ["what"]}
        then.append({"if": condition, "then": table})
    return {"type": "object", "properties": {"what": name_schema}, "required": ["what"], "allOf": then}
