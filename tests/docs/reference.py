"""The pages of docs/reference and docs/environment.md, out of what the code says of itself."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from distsim.cli.dispatch import COMMANDS, EXIT_CODES, Parser, module_of
from distsim.cluster.files.spec import ClusterSpec
from distsim.debug.settings import VARIABLES, Settings
from distsim.scenario.file.schema import json_schema
from distsim.text.file_tables import FileTable, tables_in, unit_of
from distsim.torch_compat.releases import VERSIONS

__all__ = ["PAGES", "clusters", "commands", "environment", "python", "scenarios", "versions"]

MADE = "<!-- Made by `python -m tests.docs.generate`: change what it is made of. -->\n"


def cell(text: str) -> str:
    """As it stands in a table of Markdown."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`"


# -- scenario files


def scenarios() -> str:
    """Every key of a scenario file, every fault."""
    schema = json.loads(json_schema())
    parts = [
        f"{MADE}# Scenario files\n",
        "A scenario is a TOML file beside a program: where it runs, what goes wrong, what is expected. `distsim "
        "scenario schema` prints this as JSON schema; `distsim scenario new hang.toml` writes a first file, a program, "
        "and the schema for your editor. Times are seconds or text with a unit (`5ms`), sizes bytes or text "
        "(`512MiB`).\n",
        "## The file\n",
        keys({"properties": {k: v for k, v in schema["properties"].items() if k not in ("expect", "limits", "faults")},
              "required": schema["required"]}),
    ]  # fmt: skip
    for name in ("expect", "limits"):
        table = schema["properties"][name]
        parts += [f"## `[{name}]`\n", table["description"] + "\n", keys(table)]
        for key, value in table["properties"].items():
            if "properties" in value:
                parts += [f"### `[{name}.{key}]`\n", value["description"] + "\n", keys(value)]
    parts += ["## `[[faults]]`\n", "Each has a `what`, which says what else it may have.\n"]
    for choice in sorted(schema["properties"]["faults"]["items"]["allOf"], key=lambda c: _what(c)):
        table = dict(choice["then"])
        table["properties"] = {key: value for key, value in table["properties"].items() if key != "what"}
        parts += [f"### {_what(choice)}\n", table["description"] + "\n", keys(table)]
    return "\n".join(parts)


def _what(choice: dict[str, Any]) -> str:
    return str(choice["if"]["properties"]["what"]["const"])


def keys(table: dict[str, Any]) -> str:
    """A table of its keys."""
    lines = ["| key | value | default | |", "| --- | --- | --- | --- |"]
    for name, value in table["properties"].items():
        needed = name in table.get("required", ())
        default = "needed" if needed else code(json.dumps(value["default"])) if "default" in value else ""
        lines.append(f"| `{name}` | {kind(value)} | {default} | {cell(value.get('description', ''))} |")
    return "\n".join(lines) + "\n"


def kind(value: dict[str, Any]) -> str:
    """What a key may be, in a few words."""
    if "const" in value:
        return code(json.dumps(value["const"]))
    if "enum" in value:
        names = [str(one) for one in value["enum"]]
        if "replicas_diverge" in names:
            return "a [kind of silent fault](../silent.md)"
        return "a [kind of diagnosis](../kinds.md)" if len(names) > 12 else ", ".join(map(code, names))
    if "anyOf" in value:
        example = next((e for one in value["anyOf"] for e in one.get("examples", ())), None)
        if example is not None:
            return f"number, or text such as `{example}`"
        return " or ".join(kind(one) for one in value["anyOf"])
    if value.get("type") == "array":
        return f"list of {kind(value['items'])}" if value.get("items") else "list"
    if value.get("type") == "object":
        inner = value.get("additionalProperties") or next(iter(value.get("patternProperties", {}).values()), None)
        return f"table of {kind(inner)}" if inner else "table"
    return {"integer": "whole number", "string": "text", "number": "number", "boolean": "true or false"}.get(
        str(value.get("type")), "anything"
    )


# -- cluster files


def clusters() -> str:
    """Every key of a cluster file."""
    parts = [
        f"{MADE}# Cluster files\n",
        "A cluster is a TOML file. `distsim topo show dgx-h100 --toml` prints a whole one to begin with; `--on "
        "my.toml` takes it, `--on my.toml:4` with four nodes. Quantities have a unit (`GBps`, `us`, `GB`, `TFLOPS`); "
        "without one they are bytes per second, seconds, bytes and operations per second.\n",
    ]
    for path, table in tables(ClusterSpec):
        text = " ".join((table.__doc__ or "").split())
        parts += [f"## {code(path) if path else 'The file'}\n", f"{text}\n", _keys(table)]
    return "\n".join(parts)


def tables(table: type[FileTable], path: str = "") -> Iterator[tuple[str, type[FileTable]]]:
    """It, and those inside it."""
    yield path, table
    for name, known in table.model_fields.items():
        for inner in tables_in(known.annotation):
            where = f"{path[1:-1]}.{name}" if path else name
            if get_origin(known.annotation) is dict:
                where += ".NAME"
            yield from tables(inner, f"[{where}]{_kind_of(inner)}")


def _kind_of(table: type[FileTable]) -> str:
    known = table.model_fields.get("kind")
    return "" if known is None else f' kind = "{get_args(known.annotation)[0]}"'


def _keys(table: type[FileTable]) -> str:
    lines = ["| key | value | default | |", "| --- | --- | --- | --- |"]
    for name, known in table.model_fields.items():
        lines.append(f"| `{name}` | {_value(known)} | {_default(known)} | {cell(known.description or '')} |")
    return "\n".join(lines) + "\n"


def _value(known: FieldInfo) -> str:
    if list(tables_in(known.annotation)):
        return "table"
    if unit_of(known):
        return f"number with a unit, `{unit_of(known)}`"
    return _plain(known.annotation)


def _plain(annotation: Any) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _plain(inside[0])
    if origin is Literal:
        return ", ".join(code(str(one)) for one in inside)
    if origin in (Union, types.UnionType):
        return _plain(next(one for one in inside if one is not type(None)))
    if origin in (dict, list):
        return f"{'table' if origin is dict else 'list'} of {_plain(inside[-1])}"
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}[annotation]


def _default(known: FieldInfo) -> str:
    if known.is_required():
        return "needed"
    value = known.get_default(call_default_factory=True)
    if isinstance(value, FileTable) or value is None or value in ("", {}):
        return ""
    if isinstance(value, float) and unit_of(known):
        scale = {"GBps": 1e9, "us": 1e-6, "GB": 1e9, "TFLOPS": 1e12}[unit_of(known)]
        return code(f"{value / scale:.4g} {unit_of(known)}")
    return code(json.dumps(value))


# -- the command line


def commands() -> str:
    """Every command and flag, from the parsers themselves."""
    parts = [f"{MADE}# Command line\n", "```text", textwrap.dedent(EXIT_CODES).strip(), "```\n"]
    for name, line in COMMANDS.items():
        parser = Parser(prog="distsim")
        added = parser.add_subparsers(dest="command")
        importlib.import_module(module_of(name)).add_parser(added)
        parts += _command(added.choices[name], line, 2)
    return "\n".join(parts)


def _command(parser: argparse.ArgumentParser, line: str, depth: int) -> list[str]:
    parts = [f"{'#' * depth} {parser.prog}\n", f"{line[:1].upper()}{line[1:]}.\n" if line else ""]
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    rows = [
        _flag(parser, a)
        for a in parser._actions
        if a not in inner and a.help != argparse.SUPPRESS and not _of_torchrun(parser, a)
    ]
    rows = [row for row in rows if not row.startswith("| `-h`")]
    if parser.prog == "distsim run":
        parts.append("Every flag of torchrun is taken as well.\n")
    if rows:
        parts += ["| | |", "| --- | --- |", *rows, ""]
    for group in inner:
        lines = {choice.dest: choice.help or "" for choice in group._choices_actions}
        for name, sub in group.choices.items():
            parts += _command(sub, lines.get(name, ""), depth + 1)
    return parts


def _of_torchrun(parser: argparse.ArgumentParser, action: argparse.Action) -> bool:
    """Its flags are told in torch's own documentation, and differ from release to release."""
    if parser.prog != "distsim run" or not action.option_strings:
        return False
    from torch.distributed.run import get_args_parser

    return action.option_strings[0] in get_args_parser()._option_string_actions


def _flag(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    told = parser._get_formatter()._expand_help(action) if action.help else ""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices is not None else None
    value = action.metavar or choices or (action.dest.upper() if action.option_strings else action.dest)
    takes = action.nargs != 0
    shown = value if isinstance(value, str) else " ".join(value)
    names = [f"{flag} {shown}" if takes else flag for flag in action.option_strings] or [shown]
    if len(names) > 1 and takes:
        names = [*action.option_strings[:-1], names[-1]]
    return f"| {', '.join(map(code, names))} | {cell(told)} |"


# -- Python

NAMES = {
    "distsim": [
        "simulate",
        *("run", "fits", "tune", "sweep", "buy", "equal", "bench", "diagnose", "attach", "CommandResult"),
        "Outcome",
        "guard",
        "kernel_cost",
        "varies",
        "DistsimError",
        "UsageError",
        "RankFailure",
        "NotSimulated",
    ],
    "distsim.debug": ["install", "remove"],
    "distsim.test": ["ranks"],
    "distsim.debug.records.diagnosis": ["Diagnosis", "Call", "Stuck"],
    "distsim.cluster": ["load_cluster"],
    "distsim.network": ["make_network", "Transfer"],
}
"""Names that a user's program calls or reads."""


def python() -> str:
    """The names that programs use, with their own words."""
    parts = [
        f"{MADE}# Python\n",
        "`import distsim as dist` has every name of `torch.distributed`, as the same object, and the names below. A\n"
        "name that both have is distsim's: `dist.debug` is `distsim.debug`, which also has the names of\n"
        "`torch.distributed.debug`.\n",
    ]
    for module, names in NAMES.items():
        for name in names:
            found = getattr(importlib.import_module(module), name)
            parts += [f"## {module}.{name}\n", *_signature(name, found), *_words(found)]
            if inspect.isclass(found) and not issubclass(found, BaseException):
                parts += _attributes(found)
    return "\n".join(parts)


def _signature(name: str, found: Any) -> list[str]:
    if inspect.isclass(found):
        return []
    text = re.sub(r"""(: |-> )(["'])((?:(?!\2).)*)\2""", r"\1\3", f"{name}{inspect.signature(found)}")
    if len(text) > 88:
        text = re.sub(r", (?=\*?\w+(:|=|,|\)))", ",\n    ", text.replace("(", "(\n    ", 1))
        text = re.sub(r"\)( -> [^)]*)$", r",\n)\1", text)
    return ["```text", text, "```\n"]


def _words(found: Any) -> list[str]:
    """A Google-style docstring as Markdown: sections become lists, other indented parts code."""
    text = inspect.getdoc(found) or ""
    text = re.sub(r"(?m)^(Args|Returns|Raises|Attributes|Source):\n((?:    .*\n?|\n(?=    ))+)", _section, text)
    return [
        re.sub(r"(?m)(?:^    .*\n?(?:^\n)?)+", lambda m: f"```text\n{textwrap.dedent(m[0]).rstrip()}\n```\n", text)
        + "\n"
    ]


def _section(match: re.Match[str]) -> str:
    entries = re.split(r"\n(?=\S)", textwrap.dedent(match[2]).strip())
    if match[1] in ("Returns", "Source"):
        return f"**{match[1]}:** {' '.join(match[2].split())}\n"
    pairs = [" ".join(entry.split()).partition(": ") for entry in entries]
    names = "\n".join(f"- `{name}`: {meaning}" for name, _, meaning in pairs)
    return f"**{match[1]}:**\n\n{names}\n"


def _attributes(found: type) -> list[str]:
    """A line for each attribute and property that says what it is; those without a word of their own by name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(found))).body
    assert isinstance(tree, ast.ClassDef)
    rows = []
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            told = after.value.value if _is_text(after) else ""
            kind = re.sub(r"\b(Rank|Whole|Integer)\b", "int", ast.unparse(node.annotation)).replace("Number", "float")
            rows.append(f"| `{node.target.id}` | {code(kind)} | {cell(told)} |")
        if (
            isinstance(node, ast.FunctionDef)
            and node.name[0] != "_"
            and "property" in map(ast.unparse, node.decorator_list)
        ):
            told = (ast.get_docstring(node) or "").partition("\n\n")[0]
            rows.append(f"| `{node.name}` | {code(ast.unparse(node.returns) if node.returns else '')} | {cell(told)} |")
    return ["| attribute | type | |", "| --- | --- | --- |", *rows, ""] if rows else []


def _is_text(node: ast.stmt | None) -> Any:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# -- the environment


def environment() -> str:
    """Every environment variable that distsim reads."""
    texts = _field_texts(Settings)
    lines = ["| variable | default | |", "| --- | --- | --- |"]
    for field, variable in Settings.variables().items():
        value = getattr(Settings, field)
        default = "" if value in ("", None) else code(f"{value:g}" if isinstance(value, float | int) else value)
        lines.append(f"| `{variable}` | {default} | {cell(texts[field])} |")
    lines += [f"| `{name}` | | {cell(text)} |" for name, text in VARIABLES.items()]
    return "\n".join(
        [
            f"{MADE}# Environment variables\n",
            "Real jobs under guard (`distsim run --on gloo`, `python -m distsim.debug`, `distsim.debug.install()`) "
            "read these variables. A flag or an argument overrides its variable. Times are in seconds. A variable "
            "`DISTSIM_...` that is not in this table causes a warning with the nearest name. [Files, ports and "
            "rights](files.md) of a job, and the variables of other tools that it reads, have a page of their own.\n",
            *lines,
        ]
    )


def _field_texts(table: type) -> dict[str, str]:
    """The docstring below each field of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(table))).body
    assert isinstance(tree, ast.ClassDef)
    pairs = zip(tree.body, [*tree.body[1:], None], strict=True)
    return {
        ast.unparse(n.target): after.value.value
        for n, after in pairs
        if isinstance(n, ast.AnnAssign) and _is_text(after)
    }  # type: ignore[union-attr]


def versions() -> str:
    """Which releases of torch and Python are tested for which part."""
    rows = [
        f"| {part} | {torch if isinstance(torch, str) else ', '.join(torch)} | {python} | {tests} |"
        for part, torch, python, tests in VERSIONS
    ]
    return "\n".join(
        [
            "# Versions of torch and Python",
            MADE,
            "| part | torch | Python | what was tested there |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            "No torch is refused for its number. A run says in a line that torch is older or newer than tested ones,",
            "and what it lacks; a part whose needs a torch does not meet is refused.",
            "`distsim doctor` prints this table and where the torch at hand stands.",
            "",
            "On torch 2.6 and 2.7 a job on gloo may wait for ever in `destroy_process_group`, with distsim or without:",
            "the destructor of its group holds the interpreter's lock while it waits for a thread that wants it.",
            "",
            NEWER.strip(),
        ]
    )


NEWER = Path(__file__).with_name("newer_torch.md").read_text(encoding="utf-8")


PAGES = {
    "environment.md": environment,
    "reference/scenario.md": scenarios,
    "reference/cluster.md": clusters,
    "reference/cli.md": commands,
    "reference/python.md": python,
    "reference/versions.md": versions,
}
"""Pages below docs that are made, and what makes each."""
