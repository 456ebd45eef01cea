"""Every public name of torch.distributed's submodules: which of them are simulated, torch's own or refused.

`python -m tests.conformance.api_modules` adds what this torch has and `api_modules.txt` lacks, with a file of tests
that uses it, and then writes docs/api_table.md (api_names.py). One line a name, below its module:

    name | simulated | shown in

A name is public if it is in the `__all__` of its module, or, in a module without one, if it is a class or function that
is defined there. It is listed once, under the shortest module. shown in: a file of tests whose programs use it, or `-`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import pkgutil
import types
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

FILE = Path(__file__).parent / "api_modules.txt"
TESTS = FILE.parents[1]
OF_OTHER_PACKAGES = ("elastic.rendezvous.etcd_rendezvous_backend",)
"""Modules that can be imported only where a further package (urllib3) is."""
PRIVATE = ("_symmetric_memory", "_functional_collectives")
"""Modules of a private name whose names programs and torch's documentation use."""
RELEASE = "2.13"
"""The release of torch whose names are listed."""


MARKS = {"same": "", "yes": " (simulated)", "refused": " (refused)"}
HEAD = f"""
## Submodules

Public names of the submodules of torch {RELEASE} that are not listed above, each once. In a simulated rank each is
torch's own object, whose communication is simulated, except: *simulated*, distsim's own object; *refused*,
`NotSimulated` with a remedy. `_symmetric_memory` and FSDP1 need GPUs, also on gloo.
"""


class ModuleRow(NamedTuple):
    """One name of a submodule, which is a path below torch.distributed."""

    module: str
    name: str
    simulated: str
    shown: str


def module_rows() -> list[ModuleRow]:
    """All of `api_modules.txt`."""
    rows, module = [], ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            module = line[2:]
        elif line.strip():
            rows.append(ModuleRow(module, *(word.strip() for word in line.split("|"))))
    return rows


def resolved(row: ModuleRow) -> Any:
    """The object that a line speaks of."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"torch.distributed.{row.module}"), row.name)


def has_module(row: ModuleRow) -> bool:
    """Whether the module can be imported: some need packages that torch does not require."""
    with contextlib.suppress(ImportError, AttributeError):
        resolved(row)
        return True
    return False


def public_names() -> dict[str, list[str]]:
    """The public names of each submodule of this torch, by its path below torch.distributed."""
    seen = {id(value) for name, value in vars(dist).items() if not name.startswith("_")}
    result: dict[str, list[str]] = {}
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        modules = sorted(_modules(), key=lambda pair: (pair[0].count("."), pair[0]))
    for path, module in modules:
        for name in _public(module):
            value = getattr(module, name, None)  # torch.distributed.rpc lists one that it has not
            is_plain = type(value) in (int, str, float, bool)
            if value is not None and (is_plain or id(value) not in seen):
                seen.add(id(value))
                result.setdefault(path, []).append(name)
    return result


def _modules(paths: Iterable[str] = dist.__path__, parent: str = "") -> Iterator[tuple[str, types.ModuleType]]:
    """Yield the modules below a package, which is a path below torch.distributed, and import no private one."""
    for info in pkgutil.iter_modules(paths):
        if info.name.startswith("_") and info.name not in PRIVATE:
            continue
        path = f"{parent}{info.name}"
        if path in OF_OTHER_PACKAGES:
            continue
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"torch.distributed.{path}")
            yield path, module
            if info.ispkg:
                yield from _modules(module.__path__, f"{path}.")


def _public(module: types.ModuleType) -> list[str]:
    if named := getattr(module, "__all__", None):
        return list(named)
    mine = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    return [name for name in mine if not name.startswith("_") and callable(getattr(module, name))]


def _users() -> dict[str, str]:
    """A file of tests for each name of torch.distributed that one imports by name."""
    users: dict[str, str] = {}
    for path in sorted(TESTS.glob("*/*.py"), key=lambda path: ("conformance" not in path.parts, path)):
        if path.parent.name in ("house", "docs"):
            continue
        modules = set()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
                for alias in node.names:
                    users.setdefault(alias.name, f"{path.parent.name}/{path.name}")
                    modules.add(alias.asname or alias.name)
            elif isinstance(node, ast.Import):
                modules |= {alias.asname or "" for alias in node.names if alias.name.startswith("torch.distributed.")}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                users.setdefault(node.attr, f"{path.parent.name}/{path.name}")
    return users


def add_missing() -> None:
    """Write `api_modules.txt` with the names that it lacks."""
    rows = {(row.module, row.name): row for row in module_rows()} if FILE.exists() else {}
    users = _users()
    for module, names in public_names().items():
        for name in names:
            row = rows.get((module, name), ModuleRow(module, name, "same", "-"))
            rows[module, name] = row._replace(shown=users.get(name, "-")) if row.shown == "-" else row
    lines, module = [], None
    for row in sorted(rows.values()):
        if row.module != module:
            module = row.module
            lines += [*([""] if lines else []), f"# {module}"]
        lines.append(" | ".join(row[1:]))
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def modules_section() -> str:
    """The part of docs/api_table.md about submodules: a line a module."""
    lines = [HEAD, "| module | names that tests of simulations use | the other names |", "| --- " * 3 + "|"]
    rows = module_rows()
    for module in dict.fromkeys(row.module for row in rows):
        cells = [f"`{module}`"]
        for is_shown in (True, False):
            chosen = [row for row in rows if row.module == module and (row.shown != "-") == is_shown]
            cells.append(", ".join(f"`{row.name}`{MARKS[row.simulated]}" for row in chosen))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from conformance.api_names import PAGE, page

    add_missing()
    PAGE.write_text(page(), encoding="utf-8")
