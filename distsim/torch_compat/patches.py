"""Patches of torch that keep its own calls working, taken back in reverse order.

A function is replaced by a function with its signature, `__wrapped__` and `__module__`; a class by a class; a built-in
name is never shadowed in a module of torch. A patch that cannot be put is left out and noted.
"""

from __future__ import annotations

import builtins
import functools
import inspect
from collections.abc import Callable
from typing import Any

from distsim.torch_compat.names import MISSING, Name

__all__ = ["Patches"]


class Patches:
    """Attributes of torch that were replaced, and their values before."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, name: Name, around: Callable[..., Any], also: tuple[Any, ...] = ()) -> bool:
        """Replace the function *name* by one that calls `around(original, *args, **kwargs)`.

        Args:
            name: the entry of the function.
            around: the function that is called in its place, with the original first.
            also: other holders that have the same function under the same attribute.

        Returns:
            Whether this torch has the function.
        """
        original = name.get()
        if original is MISSING:
            return False

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        for holder in (name.holder(), *also):
            if getattr(holder, name.attribute, None) is original:
                self.put(holder, name.attribute, patched)
        return True

    def put(self, holder: Any, attribute: str, value: Any) -> None:
        """Replace one attribute of *holder*, which exists.

        Raises:
            TypeError: the value is not of the kind of the original, or hides a built-in name from a module.
        """
        if inspect.ismodule(holder) and hasattr(builtins, attribute) and attribute not in vars(holder):
            raise TypeError(f"{holder.__name__}.{attribute} would hide the built-in {attribute!r} from that module")
        before = vars(holder).get(attribute, MISSING) if hasattr(holder, "__dict__") else getattr(holder, attribute)
        original = getattr(holder, attribute, MISSING)
        if original is not MISSING and isinstance(original, type) != isinstance(value, type):
            raise TypeError(f"{attribute} of torch is a {type(original).__name__}, its replacement is not")
        self._undo.append((holder, attribute, before, value))
        setattr(holder, attribute, value)

    def remove(self) -> None:
        """Put back what was there, the newest patch first; what somebody else has replaced since stays."""
        while self._undo:
            holder, attribute, before, value = self._undo.pop()
            if getattr(holder, attribute, None) is not value and vars(holder).get(attribute) is not value:
                continue
            if before is MISSING:
                delattr(holder, attribute)
            else:
                setattr(holder, attribute, before)
