"""Makes a replacement look like the function of Python or torch that it replaces (`inspect.signature`, pickle)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from distsim.sim.isolation.process import current_task

__all__ = ["class_for_ranks", "refusing_class", "resembling"]

_NAMES = ("__name__", "__qualname__", "__module__", "__doc__")


def resembling(real: Any, replacement: Any) -> Any:
    """*replacement*, with the name, module, doc and signature of the function or class *real*.

    What is not called (a flag, a tuple of defaults) is returned as it is. A compiled function that does
    not tell its signature leaves the replacement's own.
    """
    shown, looks = _function(replacement), _function(real)
    if shown is looks or not callable(looks) or not hasattr(shown, "__qualname__"):
        return replacement
    if getattr(shown, "__wrapped__", None) is looks:  # functools.wraps has done it, and inspect follows it
        return replacement
    for name in _NAMES:
        setattr(shown, name, getattr(looks, name, None))
    if isinstance(shown, FunctionType) and not isinstance(looks, type):
        shown.__wrapped__ = looks  # type: ignore[attr-defined]  # torch._dynamo unwraps torch.cuda.use_mem_pool
    signature = _signature(looks)
    if signature is not None:
        shown.__signature__ = signature
    return replacement


def class_for_ranks(real: type, *simulated: type) -> type:
    """Make a class that stands for class *real*: its instances are *simulated* in a rank and real elsewhere.

    A program may subclass it, and name it in an annotation; subclasses are simulated.
    """

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs) if cls is stand_in and current_task() is None else object.__new__(cls)

    stand_in = type(real.__name__, simulated, {"__new__": __new__})
    return stand_in


def refusing_class(real: type, error: Callable[[], Exception]) -> type:
    """Make a subclass of *real* that stands for it: a rank that makes an instance gets *error*."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        if current_task() is not None:
            raise error()
        return real(*args, **kwargs)

    return type(real.__name__, (real,), {"__new__": __new__})


_signatures: dict[int, tuple[Any, inspect.Signature | None]] = {}
"""By the function's id, with the function: worked out once a process, for that of a compiled function takes most of a
millisecond."""
_MOST = 2_000


def _signature(function: Any) -> inspect.Signature | None:
    known = _signatures.get(id(function))
    if known is None:
        if len(_signatures) >= _MOST:  # a program that makes functions anew
            _signatures.clear()
        try:
            known = function, inspect.signature(function)
        except (TypeError, ValueError):
            known = function, None
        _signatures[id(function)] = known
    return known[1]


def _function(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value
