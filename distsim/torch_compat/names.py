"""Entries for private names of torch, with their purpose, and their lookup.

`Patches` applies and removes patches of torch that keep its own calls working. A function is replaced by a function
with its signature, `__wrapped__` and `__module__`; a class by a class; a built-in name is never shadowed in a module of
torch. A patch that cannot be applied is left out and noted.

Nothing here imports torch. An entry imports the module of its name when it is looked up.
"""

from __future__ import annotations

import builtins
import enum
import functools
import importlib
import inspect
import operator
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MISSING: Any = type("_Missing", (), {"__repr__": lambda self: "MISSING", "__bool__": lambda self: False})()
"""The value of a name that this torch does not have."""


class Need(enum.Flag):
    """Importance of a name for distsim."""

    OPTIONAL = 0
    """A release without it needs no replacement."""
    FEATURE = enum.auto()
    """The feature that uses the name is unavailable, and raises an error when a program uses it."""
    GUARD = enum.auto()
    """The guard of real jobs refuses to start without it."""
    SIM = enum.auto()
    """The simulator refuses to start without it."""


OPTIONAL, FEATURE, GUARD, SIM = Need.OPTIONAL, Need.FEATURE, Need.GUARD, Need.SIM

left_out: dict[str, str] = {}
"""Features that this process goes without, by the path of the name that this torch lacks."""


@dataclass(frozen=True)
class TorchName:
    """A private name of torch.

    Args:
        path: the dotted path from `torch` on.
        feature: what distsim does with it, as a noun phrase for messages.
        need: what happens in a release that lacks the name or fails its test.
        since: the oldest release known to have it, of those that distsim supports.
        until: the newest release known to have it; None if the newest release has it.
        public: the public way, where a release has one.
        only: the condition under which a release of that range has it: a build for CUDA, after a call.
        test: whether the name behaves as distsim relies on, beyond being there; it runs once a process.
        passes_until: the newest release that passes the test, where a later one behaves otherwise.
    """

    path: str
    feature: str
    need: Need = FEATURE
    since: str = "2.6"
    until: str | None = None
    public: str | None = None
    only: str = ""
    test: Callable[[], bool] | None = None
    passes_until: str | None = None

    @property
    def private(self) -> bool:
        """Return whether the name is private; public functions are also listed if they are replaced."""
        return any(part.startswith("_") and not part.startswith("__") for part in self.path.split("."))

    @property
    def attribute(self) -> str:
        """Return the last part of the path."""
        return self.path.rpartition(".")[2]

    def holder(self) -> Any:
        """Return the module or class that holds the attribute; MISSING where this torch has no such holder."""
        return _value(self.path.rpartition(".")[0])

    def get(self, default: Any = MISSING) -> Any:
        """Return the value; *default*, and a note in `left_out`, where this torch lacks the name."""
        value = _value(self.path)
        if value is MISSING:
            self.leave_out()
            return default
        return value

    def getter(self) -> Callable[[Any], Any]:
        """Return a function that reads the attribute of an object, for paths that cannot afford a lookup."""
        return operator.attrgetter(self.attribute)

    def exists(self) -> bool:
        """Return whether this torch has the name."""
        return _value(self.path) is not MISSING

    def works(self) -> bool:
        """Return whether this torch has the name and it passes its behaviour test."""
        return self.exists() and (self.test is None or _passes(self.test))

    def replaced_by(self, value: Any) -> list[tuple[Any, str, Any]]:
        """Return the patch (holder, attribute, *value*); none, and a note in `left_out`, where this torch lacks the
        name.
        """
        if self.get() is MISSING:
            return []
        return [(self.holder(), self.attribute, value)]

    def leave_out(self) -> None:
        """Record that the feature of this name is unavailable, unless it is optional or came with a later release of
        torch."""
        if self.need is not OPTIONAL and not self._is_to_come():
            left_out[self.path] = self.feature

    def _is_to_come(self) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and bool(torch.__version__ < self.since)  # a TorchVersion compares by release


def all_names() -> dict[str, TorchName]:
    """Return every entry of the package by path."""
    package = importlib.import_module(__package__)
    names = {}
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, TorchName):
                names[value.path] = value
            elif isinstance(value, dict):  # names of one kind
                names |= {name.path: name for name in value.values() if isinstance(name, TorchName)}
    return names


def unmet(part: Need) -> list[TorchName]:
    """Return the entries without which *part* (GUARD or SIM) refuses to start, and which this torch does not meet."""
    return [name for name in all_names().values() if part in name.need and not name.works()]


def _value(path: str) -> Any:
    """Return the value at a dotted path: the longest prefix that can be imported is a module, attributes follow."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        value: Any = _module(".".join(parts[:length]))
        if value is not None:
            for part in parts[length:]:
                owner, value = value, getattr(value, part, MISSING)
                if value is MISSING and isinstance(owner, type):
                    value = inspect.get_annotations(owner).get(part, MISSING)  # an attribute of instances
                if value is MISSING:
                    break
            return value
    return MISSING


def _module(name: str) -> Any:
    module = sys.modules.get(name)
    if module is None and name not in _not_modules:
        try:
            return importlib.import_module(name)
        except Exception:  # a module of another release may fail in any way
            _not_modules.add(name)
    return module


_not_modules: set[str] = set()
"""Paths that could not be imported: an attribute, not a module."""


@functools.cache
def _passes(test: Callable[[], bool]) -> bool:
    try:
        return bool(test())
    except Exception:  # whatever another release does instead of what the test expects
        return False


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
