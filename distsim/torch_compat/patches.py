"""Patches of torch that keep its own calls working, taken back in reverse order.

A function is replaced by a function with its signature, `__wrapped__` and `__module__`; a class by a class; a built-in
name is never shadowed in a module of torch. A patch that cannot be put is left out and noted.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from distsim.torch_compat.names import MISSING, TorchName

__all__ = ["Patches"]


class Patches:
    """Replaced attributes of torch with their previous values.

    Args:
        apply: Called at each call of a wrapped function; if it returns False, torch's own function is called.
    """

    def __init__(self, apply: Callable[[], bool] | None = None) -> None:
        self._apply = apply
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, name: TorchName, around: Callable[..., Any], also: tuple[Any, ...] = ()) -> bool:
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

        apply = self._apply

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            if apply is not None and not apply():
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        for holder in (name.holder(), *also):
            if getattr(holder, name.attribute, None) is original:
                self.put(holder, name.attribute, patched)
        return True

    def wrap_static(self, name: TorchName, around: Callable[..., Any]) -> bool:
        """Do the same as `wrap` for a static method of a class."""

        def replacement(original: Any) -> Any:
            def patched(*args: Any, **kwargs: Any) -> Any:
                return around(original, *args, **kwargs)

            return staticmethod(functools.update_wrapper(patched, original))

        return self.exchange(name, replacement)

    def exchange(self, name: TorchName, replacement: Callable[[Any], Any]) -> bool:
        """Replace the function *name* by `replacement(original)`, for paths that cannot afford one more call."""
        original = name.get()
        if original is not MISSING:
            value = replacement(original)
            if inspect.isfunction(value):
                functools.update_wrapper(value, original)
            self.put(name.holder(), name.attribute, value)
        return original is not MISSING

    def put(self, holder: Any, attribute: str, value: Any) -> None:
        """Replace one attribute of *holder*, which exists.

        Raises:
            TypeError: the value is not of the kind of the original, or hides a built-in name from a module.
        """
        if inspect.ismodule(holder) and hasattr(builtins, attribute) and attribute not in vars(holder):
            raise TypeError(f"{holder.__name__}.{attribute} would hide the built-in {attribute!r} from that module")
        original = getattr(holder, attribute, MISSING)
        before = original if attribute == "__code__" else vars(holder).get(attribute, MISSING)
        if original is not MISSING and isinstance(original, type) != isinstance(value, type):
            raise TypeError(f"{attribute} of torch is a {type(original).__name__}, but its replacement is not")
        self._undo.append((holder, attribute, before, value))
        setattr(holder, attribute, value)

    def lead_global(self, name: TorchName, word: str, value: Any) -> None:
        """Bind *word* to *value* in the function *name* only; the rest of its module keeps its value.

        This is how a built-in name is led elsewhere: a module of torch uses it in other functions, too. What a program
        has put in the place of torch's function is left alone.
        """
        function = inspect.unwrap(name.get())
        if not inspect.isfunction(function):
            return name.leave_out()
        code, hidden = function.__code__, f"_distsim_{word}"
        self.put(sys.modules[function.__module__], hidden, value)
        words = tuple(hidden if one == word else one for one in code.co_names)
        self.put(function, "__code__", code.replace(co_names=words))

    def remove(self) -> None:
        """Restore the originals, the newest patch first; later replacements by others stay."""
        while self._undo:
            holder, attribute, before, value = self._undo.pop()
            if getattr(holder, attribute, None) is not value and vars(holder).get(attribute) is not value:
                continue
            if before is MISSING:
                delattr(holder, attribute)
            else:
                setattr(holder, attribute, before)
