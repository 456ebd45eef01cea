"""`self` of a test method on one simulated rank: an object of its own, as every forked rank has one."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

__all__ = ["is_plain", "on_own_instance"]

_PLAIN = (list, dict, set, tuple, deque)


def on_own_instance(
    body: functools.partial[Any], arguments: Mapping[str, Any], instance: object, own: Callable[[str, Any], Any]
) -> tuple[functools.partial[Any], dict[str, Any]]:
    """*body* and its *arguments* with a copy of *instance* as `self`: its tensors, models, lists, dicts and sets are
    copied by *own*, which is told their names; other objects it refers to are everybody's."""
    mine = copy.copy(instance)
    for name, value in vars(mine).items():
        if not name.startswith("_"):  # unittest's own
            vars(mine)[name] = own(f"self.{name}", value)
    method: Any = body.func
    if getattr(method, "__self__", None) is instance:
        method = MethodType(method.__func__, mine)
    first = [mine if argument is instance else argument for argument in body.args]
    named = {name: mine if argument is instance else argument for name, argument in arguments.items()}
    return functools.partial(method, *first), named


def is_plain(value: object) -> bool:
    """Whether *value* is one of Python's containers."""
    return type(value) in _PLAIN
