"""The body of an installed module, run once in each process: one code object, read once, for all.

Some statements cannot be repeated in one Python process, because they enter something into a registry of
a library that all processes share (`pyarrow.register_extension_type` says "already defined"). What the
first process entered stands for all; the others go on with the statement after it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

__all__ = ["ModuleBodies"]

_AGAIN = re.compile(r"already|duplicate|more than once|twice|re-?regist|exists|conflict", re.IGNORECASE)
"""In the words of a library's registry. The operating system has the same words (`File exists`) for what every
process would be told."""
_ANNOTATIONS = 0x1000000
"""CO_FUTURE_ANNOTATIONS, the one future that changes how today's Python compiles (Lib/__future__.py)."""


class ModuleBodies:
    """Code and first instances of the installed modules of one simulation."""

    def __init__(self) -> None:
        self._codes: dict[str, CodeType] = {}
        self._first: dict[str, ModuleType] = {}

    def run(
        self, module: ModuleType, path: str, read: Callable[[], CodeType], source: Callable[[], str | None]
    ) -> None:
        """Execute the module at *path* in *module*; *read* and *source* give its code and its text."""
        code = self._codes.get(path)
        if code is None:
            code = self._codes[path] = read()
        statements: list[ast.stmt] | None = None
        while True:
            try:
                exec(code, module.__dict__)
            except Exception as exc:
                first = self._first.get(path)
                if first is None or isinstance(exc, OSError) or not _AGAIN.search(str(exc)):
                    raise
                if statements is None:
                    text = source()
                    if text is None:  # compiled files alone are installed
                        raise
                    statements = ast.parse(text).body
                failed = _statement_at(statements, _line(exc, path))
                if failed is None:
                    raise
                for name in _bound_by(statements[failed]):
                    if name not in module.__dict__ and name in first.__dict__:
                        module.__dict__[name] = first.__dict__[name]
                rest = ast.Module(statements[failed + 1 :], type_ignores=[])
                code = compile(rest, path, "exec", code.co_flags & _ANNOTATIONS, dont_inherit=True)
                continue
            break
        self._first.setdefault(path, module)


def _line(exc: BaseException, path: str) -> int:
    """The line of the module's body at which *exc* passed through."""
    trace = exc.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename == path:
            return trace.tb_lineno
        trace = trace.tb_next
    return 0


def _statement_at(statements: list[ast.stmt], line: int) -> int | None:
    for number, statement in enumerate(statements):
        decorators: list[Any] = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(d.lineno for d in decorators)])
        if first <= line <= (statement.end_lineno or first):
            return number
    return None


def _bound_by(statement: ast.stmt) -> list[str]:
    """Names that *statement* would have given a value in its module."""
    names: list[str] = []
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.extend((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        todo.extend(ast.iter_child_nodes(node))
    return names
