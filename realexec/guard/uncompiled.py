"""torch.compile is not to look into the guard: what it would trace there is bookkeeping, and groups it cannot read.

Its Python half is not loaded for that (it takes a second or two); its frame evaluator, which is always there, is
told of each of our code objects.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

from distsim.torch_compat import compiler

__all__ = ["leave_uncompiled"]

OURS = ("distsim.realexec", "distsim.debug")


def leave_uncompiled() -> None:
    """Tell it of all functions of the guard that are loaded by now."""
    leave = compiler.leaves_code()
    if leave is None:
        return  # another torch
    for name, module in sys.modules.copy().items():
        if name.startswith(OURS) and isinstance(module, ModuleType):
            for code in _codes(module):
                leave(code)


def _codes(module: ModuleType) -> Iterator[CodeType]:
    held = list(vars(module).values())
    held += [member for one in held if isinstance(one, type) for member in vars(one).values()]
    for one in held:
        function = getattr(one, "fget", None) or getattr(one, "__func__", one)
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
