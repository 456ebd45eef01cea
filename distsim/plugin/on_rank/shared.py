"""What simulated ranks share though forked ones would not: named where a test has failed, for it may be the cause."""

from __future__ import annotations

import enum
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from distsim.plugin.on_rank.fixtures import holds_tensors
from distsim.plugin.options import PerRank

__all__ = ["shared_note"]

_HARMLESS = (
    *(int, float, complex, str, bytes, bool, type(None), range, slice, frozenset, enum.Enum, os.PathLike, type),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType, PerRank),
)
"""Nothing that a rank could change under another."""
_CONTAINERS = (list, dict, set, deque)


def shared_note(body: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """One line, or nothing: which *arguments* and which globals of *body* all ranks have in common."""
    names = [f"{name!r} (a fixture)" for name, value in arguments.items() if _is_shared(value)]
    function = getattr(getattr(body, "func", body), "__func__", getattr(body, "func", body))
    code, space = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is not None:
        used = dict.fromkeys(name for part in _parts(code) for name in part.co_names)
        names += [f"{name!r} (a global)" for name in used if isinstance(space.get(name), _CONTAINERS)]
    if not names:
        return ""
    return f"passes on gloo? There each rank has its own {' and '.join(names)}; simulated ranks share one"


def _is_shared(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_shared, value))
    of_pytest = type(value).__module__.partition(".")[0] in ("_pytest", "pytest", "distsim")
    return not of_pytest and not isinstance(value, _HARMLESS) and not holds_tensors(value)


def _parts(code: CodeType) -> Iterator[CodeType]:
    """*code* and the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
