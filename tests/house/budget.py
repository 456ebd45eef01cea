"""Counts what the laws of size hold, and writes `budget.toml` anew.

python -m tests.house.budget           # today's counts beside the budget
python -m tests.house.budget --lower   # write what has fallen; a budget that has to rise is raised by hand
"""

from __future__ import annotations

import ast
import importlib
import sys
import tomllib
from collections import Counter
from pathlib import Path

from torch.distributed import ProcessGroup

from tests.house.tree import CODE, ROOT, nodes_of, python_files

__all__ = ["BUDGET", "called_once", "code_lines", "functions", "lines", "private_names_in_tests", "read", "today"]

BUDGET = Path(__file__).parent / "budget.toml"
OTHERS = (
    "os",
    "threading",
    "torch",
    "torch.cuda",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.nn",
)
"""Modules whose private names tests use as users do."""
HEAD = """\
# Laws of size, held by tests/house/test_budget.py. `python -m tests.house.budget --lower` writes what has fallen.
# A figure is raised by hand, with the reason in the commit's message, and then something else falls.
"""


def code_lines(path: Path) -> int:
    """Lines of a file that are neither blank, comment nor docstring."""
    documented: set[int] = set()
    for node in nodes_of(path):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            for statement in body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    if isinstance(statement.value.value, str):  # a docstring, or what documents an attribute above it
                        documented.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return sum(
        number not in documented and bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    )


def _package(path: Path) -> str:
    """The package whose budget pays for a file: two folders, three inside of the simulator."""
    folders = path.relative_to(ROOT).parts[:-1]
    if folders[0] in ("tests", "tools"):
        return folders[0]
    return "/".join(folders[: 3 if folders[:2] == ("distsim", "sim") else 2])


def lines() -> dict[str, int]:
    """Lines of code of each package."""
    counts: Counter[str] = Counter()
    for path in python_files(*CODE, "scenarios", "tests", "tools"):
        counts[_package(path)] += code_lines(path)
    return dict(sorted(counts.items()))


def functions() -> dict[str, float]:
    """Functions of each package in 100 of its lines, those of classes and inner ones included."""
    defined: Counter[str] = Counter()
    written: Counter[str] = Counter()
    for path in python_files(*CODE):
        package = _package(path)
        written[package] += len(path.read_text(encoding="utf-8").splitlines())
        defined[package] += sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes_of(path))
    return {package: round(100 * defined[package] / written[package], 1) for package in sorted(written)}


def called_once() -> int:
    """Functions without a decorator whose name is defined once and read once in all of the product."""
    defined: Counter[str] = Counter()
    read: Counter[str] = Counter()
    decorated: set[str] = set()
    for path in python_files(*CODE):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                defined[node.name] += 1
                if node.decorator_list or node.name.startswith("__"):
                    decorated.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                read[node.id] += 1
            elif isinstance(node, ast.Attribute):
                read[node.attr] += 1
    return sum(defined[name] == read[name] == 1 and name not in decorated for name in defined)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _private_names() -> set[str]:
    """Names with an underscore that the product defines: functions, classes, variables, attributes. Those that torch or
    Python have, too (`os._exit`, `_reconfigure`), are theirs.
    """
    names: set[str] = set()
    for path in python_files(*CODE):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    theirs = {name for owner in OTHERS for name in dir(importlib.import_module(owner))} | {*dir(ProcessGroup)}
    return {name for name in names if _is_private(name)} - theirs


def private_names_in_tests() -> list[str]:
    """Places in tests that import, read or replace a private name of the product."""
    ours = _private_names()
    places = []
    for path in python_files("tests"):
        own = {  # a test's own helper may have the name of one of ours
            node.name for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        } | {node.attr for node in nodes_of(path) if isinstance(node, ast.Attribute) and _is_of_self(node)}
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distsim."):
                names = [part for alias in node.names for part in [*str(node.module).split("."), alias.name]]
            elif isinstance(node, ast.Attribute) and not _is_of_self(node):
                names = [node.attr] if node.attr not in own else []
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
                names = [part for word in node.args[:2] for part in _dotted(word)]
            else:
                continue
            places += [f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in names if name in ours]
    return places


def _is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _dotted(node: ast.expr) -> list[str]:
    """The parts of a dotted name that is given as a string."""
    return node.value.split(".") if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def read() -> dict[str, dict[str, float]]:
    """The tables of `budget.toml`: `lines`, `functions` and `counts`."""
    return tomllib.loads(BUDGET.read_text(encoding="utf-8"))


def today() -> dict[str, dict[str, float]]:
    """What the files of this checkout count, in the tables of `budget.toml`."""
    counts = {"called once": called_once(), "private names in tests": len(private_names_in_tests())}
    return {"lines": dict(lines()), "functions": functions(), "counts": dict(counts)}


def _write(tables: dict[str, dict[str, float]]) -> None:
    text = HEAD
    for title, table in tables.items():
        text += f"\n[{title}]\n" + "".join(f'"{name}" = {figure}\n' for name, figure in table.items())
    BUDGET.write_text(text, encoding="utf-8")


def main(argv: list[str]) -> int:
    """Print today's counts beside the budget, or lower it; exit code 1 where something is above it."""
    counts = today()
    budget = read() if BUDGET.exists() else counts
    over = False
    for title, table in counts.items():
        for name, figure in table.items():
            limit = budget[title].get(name, 0)
            over |= figure > limit
            print(f"{title:<10} {name:<28} {figure:>8}   budget {limit:>8}{'   over' * (figure > limit)}")
    if argv == ["--lower"]:
        _write(
            {
                title: {name: min(figure, budget[title].get(name, 0)) for name, figure in table.items()}
                for title, table in counts.items()
            }
        )
    return int(over)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
