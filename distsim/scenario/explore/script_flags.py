"""The flags of a training script that change its layout, read from its source without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Flag", "own_sources", "role_of", "script_flags", "with_flag"]

MOST_FILES = 40
"""Files beside the script that are read for flags."""
ROLES = {
    "micro_batch": r"mbs|bs|batch|((micro|local|train|device|per-device(-train)?|train-micro)-)?batch-size(-per-gpu)?",
    "accumulation": r"accum|grad(ient)?-accum(ulation)?(-steps)?|accumulation-steps|num-micro-?batches",
    "recomputation": r"ckpt|ac|ac-mode|checkpoint-activations|recompute(-activations|-granularity)?"
    r"|(grad(ient)?|activation)-(ckpt|checkpoint(ing)?)",
    "tensor_parallel": r"tp|tp-size|tp-degree|tensor(-model)?-parallel(-size|-degree)?",
    "pipeline": r"pp|pp-size|pp-degree|pipeline(-model)?-parallel(-size|-degree)?",
}
"""Roles of flags with the patterns of their names, without leading dashes, with - for _ and without the part before a
dot.
"""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a script."""

    name: str
    """Name of the flag as written: `--micro-batch-size`."""
    value: str | None
    """Value on the command line, or else the default; None if it is not known."""
    choices: tuple[str, ...] = ()
    is_switch: bool = False
    """Whether the flag takes no value; its `value` is then "True" if it is given."""


def script_flags(script: Path, arguments: Sequence[str]) -> list[Flag]:
    """Return the flags of *script* and those in *arguments*.

    Flags are found in calls of argparse's `add_argument` in *script* and in the modules beside it that it imports.
    """
    flags: dict[str, Flag] = {}
    for call in _added_arguments(script):
        names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        name = next((n for n in names if n.startswith("--")), None)
        if name is not None:
            flags.setdefault(name, _flag(name, {word.arg: word.value for word in call.keywords if word.arg}))
    given = list(arguments)
    for i, word in enumerate(given):
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            continue
        name = next((n for n in flags if n == name or n.replace("_", "-") == name.replace("_", "-")), name)
        known = flags.get(name)
        if not equals:
            following = given[i + 1] if i + 1 < len(given) else "--"
            takes_value = not following.startswith("--") and not (known is not None and known.is_switch)
            value = following if takes_value else "True"
        is_switch = known.is_switch if known is not None else value == "True"
        flags[name] = Flag(name, value, () if known is None else known.choices, is_switch)
    return list(flags.values())


def _flag(name: str, keywords: dict[str, ast.expr]) -> Flag:
    action = _constant(keywords.get("action"))
    choices = keywords.get("choices")
    values = choices.elts if isinstance(choices, ast.Tuple | ast.List) else []
    words = tuple(str(v.value) for v in values if isinstance(v, ast.Constant))
    default = _constant(keywords.get("default"))
    return Flag(name, default, words if len(words) == len(values) else (), action == "store_true")


def _constant(node: ast.expr | None) -> str | None:
    return str(node.value) if isinstance(node, ast.Constant) and node.value is not None else None


def _added_arguments(script: Path) -> Iterator[ast.Call]:
    for _, tree in _sources(script):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                yield node


def own_sources(script: Path) -> list[Path]:
    """Return *script* and the modules beside it that it imports, directly or not."""
    return [path for path, _ in _sources(script)]


def _sources(script: Path) -> Iterator[tuple[Path, ast.Module]]:
    todo, seen = [script], {script}
    while todo and len(seen) <= MOST_FILES:
        path = todo.pop(0)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        yield path, tree
        for module in _imported(tree):
            stem = script.parent / module.replace(".", "/")
            for file in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
                if file not in seen and file.is_file():
                    seen.add(file)
                    todo.append(file)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def role_of(flag: Flag) -> str | None:
    """Return what *flag* is for: one of `ROLES`, None for any other."""
    name = flag.name.lstrip("-").rpartition(".")[2].replace("_", "-")
    return next((role for role, pattern in ROLES.items() if re.fullmatch(pattern, name)), None)


def with_flag(arguments: Sequence[str], name: str, value: str | None) -> list[str]:
    """Return *arguments* in which the flag *name* has *value* (None: it is a switch), wherever it stood before."""
    left: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == name:
            if value is not None and rest:
                rest.pop(0)
        elif not word.startswith(f"{name}="):
            left.append(word)
    return [*left, name if value is None else f"{name}={value}"]
