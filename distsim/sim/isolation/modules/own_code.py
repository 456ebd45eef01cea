"""The user's files as code of a simulated process: it reports what it handles, and has a hash seed of its own.

Python's `str` hashes have one seed a process, so that the order of a set of strings is another one on each rank of a
real job. All simulated ranks live in one process. So the user's own files are compiled with a call wherever they
go through an iterable or ask for a `hash`: a set that holds strings is given in the rank's own order. What
libraries do with such a set is the same on all ranks. PYTHONHASHSEED gives all ranks one order, as in a real job.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import os
from collections.abc import Callable, Iterator
from hashlib import blake2b
from types import CodeType
from typing import Any

from distsim.debug.evidence.watched_source import compiled, report_to, watch_imports
from distsim.sim.kernel.task import current_process

__all__ = ["caught_by_ranks", "own_code"]

ORDERED, HASHED = "__distsim_ordered__", "__distsim_hashed__"
TAKES_ALL = frozenset({"list", "tuple", "enumerate", "iter", "zip", "map", "filter", "fromkeys", "join", "extend"})
"""Functions and methods that go through an argument of theirs in its order."""
_ORDERED_ALREADY = frozenset({"range", "enumerate", "zip", "sorted", "reversed", "items", "keys", "values"})


class _Iterations(ast.NodeTransformer):
    """Leads what the program goes through by `ordered`."""

    module, function, name = __name__, "ordered", ORDERED

    def __init__(self) -> None:
        self._changed = False

    def apply(self, tree: ast.Module) -> bool:
        self._changed = False
        self.visit(tree)
        return self._changed

    def visit_For(self, node: ast.For) -> ast.AST:
        node.iter = self._led(node.iter)
        return self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        if not node.is_async:
            node.iter = self._led(node.iter)
        return self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> ast.AST:
        if isinstance(node.ctx, ast.Load):
            node.value = self._led(node.value)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in TAKES_ALL:
            node.args = [a if isinstance(a, ast.Starred) else self._led(a) for a in node.args]
        return self.generic_visit(node)

    def _led(self, value: ast.expr) -> ast.expr:
        if isinstance(value, ast.Constant | ast.List | ast.Tuple | ast.Lambda | ast.GeneratorExp | ast.ListComp):
            return value
        if isinstance(value, ast.Call):
            if getattr(value.func, "attr", getattr(value.func, "id", "")) in _ORDERED_ALREADY:
                return value
        self._changed = True
        call = ast.Call(ast.copy_location(ast.Name(ORDERED, ast.Load()), value), [value], [])
        return ast.copy_location(call, value)


class _Hashes(ast.NodeTransformer):
    """Leads `hash(...)` by `hashed`."""

    module, function, name = __name__, "hashed", HASHED

    def __init__(self) -> None:
        self._changed = False

    def apply(self, tree: ast.Module) -> bool:
        self._changed = False
        self.visit(tree)
        return self._changed

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "hash" and len(node.args) == 1 and not node.keywords:
            self._changed = True
            node.args.insert(0, node.func)
            node.func = ast.copy_location(ast.Name(HASHED, ast.Load()), node.func)
        return self.generic_visit(node)


_CHANGES = (_Iterations(), _Hashes())


def own_code(source: bytes, path: str) -> CodeType:
    """The code of a file of the user's program."""
    return compiled(source, path, *_CHANGES)


def ordered(values: Any) -> Any:
    """*values*, where they are a set that holds strings: in an order of this rank's own."""
    if type(values) not in (set, frozenset) or len(values) < 2 or not any(map(_is_salted, values)):
        return values
    salt = _salt()
    return values if salt is None else sorted(values, key=lambda value: _digest(salt, value))


def hashed(function: Callable[[Any], int], value: Any) -> int:
    """`hash(value)` as this rank's process has it."""
    salt = _salt() if function is builtins.hash and _is_salted(value) else None
    if salt is None:
        return function(value)
    number = int.from_bytes(_digest(salt, value), "little", signed=True)
    return -2 if number == -1 else number


def _salt() -> bytes | None:
    """The hash seed of the rank that runs; None where all have one."""
    process = current_process()
    if process is None or os.environ.get("PYTHONHASHSEED", "random") not in ("", "random"):
        return None
    return f"{process.world.seed}:{process.index}".encode()


def _is_salted(value: Any) -> bool:
    """Python hashes it with the process's seed."""
    if isinstance(value, tuple | frozenset):
        return any(map(_is_salted, value))
    return isinstance(value, str | bytes)


def _digest(salt: bytes, value: Any) -> bytes:
    if isinstance(value, frozenset):
        value = sorted(map(repr, value))
    return blake2b(repr(value).encode("utf-8", "backslashreplace"), digest_size=8, key=salt[:64]).digest()


@contextlib.contextmanager
def caught_by_ranks() -> Iterator[None]:
    """For the time of a simulation: what a rank handles is noted with its process."""
    with report_to(_note), watch_imports():
        yield


def _note(error: BaseException, code: CodeType, line: int) -> None:
    process = current_process()
    if process is not None:
        process.caught.add(error, code, line, process.calls.made)
