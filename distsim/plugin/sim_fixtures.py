"""Fixtures of one simulated rank, and the state of a test that is explored.

The fixtures contain the log and the levels of this rank only, and their changes apply to this rank only. State that
would outlive one of many runs is copied before the first one and put back before each.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pkgutil
import shutil
import sys
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from _pytest.logging import LogCaptureHandler, caplog_handler_key, caplog_records_key

from distsim.sim.isolation.torch_state.torch_state import STATE

_NOT_GIVEN: Any = object()


class _Own:
    """Replacement for the attributes that pytest's fixture reads from its test."""

    def __init__(self) -> None:
        self.stash = pytest.Stash()


def rank_log(everybodys: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return a fixture for this rank that replaces the shared *everybodys*; the root logger with its handler is the
    rank's own."""
    handler, own = LogCaptureHandler(), _Own()
    handler.setLevel(everybodys.handler.level)
    own.stash[caplog_handler_key] = handler
    own.stash[caplog_records_key] = {"call": handler.records}
    logging.root.removeHandler(everybodys.handler)
    logging.root.addHandler(handler)
    mine: Any = pytest.LogCaptureFixture(own, _ispytest=True)  # type: ignore[arg-type]
    return mine  # type: ignore[no-any-return]


class RankMonkeyPatch(pytest.MonkeyPatch):  # type: ignore[misc]  # whoever asks for one gets one
    """Attributes of modules, classes and objects, and items of dicts. The environment, the current folder and
    `sys.path` are each simulated rank's own anyway."""

    def setattr(self, target: Any, name: Any, value: Any = _NOT_GIVEN, raising: bool = True) -> None:
        if value is _NOT_GIVEN:  # ("module.attribute", value)
            target, name, value = *_resolved(target), name
        STATE.take_over(target, name)
        super().setattr(target, name, value, raising=raising)

    def delattr(self, target: Any, name: Any = _NOT_GIVEN, raising: bool = True) -> None:
        if name is _NOT_GIVEN:
            target, name = _resolved(target)
        STATE.take_over(target, name)
        super().delattr(target, name, raising=raising)

    def setitem(self, dic: Mapping[Any, Any], name: Any, value: Any) -> None:
        STATE.take_over(dic, name)
        super().setitem(dic, name, value)

    def delitem(self, dic: Mapping[Any, Any], name: Any, raising: bool = True) -> None:
        STATE.take_over(dic, name)
        super().delitem(dic, name, raising=raising)


def _resolved(path: str) -> tuple[Any, str]:
    holder, _, name = path.rpartition(".")
    return pkgutil.resolve_name(holder), name


_CONTAINERS = (list, dict, set, deque, bytearray)


class KeptState:
    """Containers of the test's module, class and fixtures, and the files of `tmp_path`.

    Args:
        body: The test's function.
        arguments: Values of its fixtures.
        instance: Its `self`; None for a function.
    """

    def __init__(self, body: Callable[..., Any], arguments: Mapping[str, Any], instance: object) -> None:
        self._originals: dict[int, tuple[str, Any, Any]] = {}
        function = getattr(getattr(body, "func", body), "__func__", getattr(body, "func", body))
        space = getattr(function, "__globals__", {})
        where = os.path.basename(space.get("__file__", "the module"))
        for name, value in space.items():
            if not name.startswith("__"):
                self._keep(f"{where}'s {name}", value)
            if isinstance(value, type) and value.__module__ == space.get("__name__"):
                for attribute, held in vars(value).items():
                    self._keep(f"{where}'s {name}.{attribute}", held)
        self._counters = [(f"{where}'s {name}", one, repr(one)) for name, one in space.items() if type(one) is count]
        for name, value in arguments.items():
            self._keep(f"the fixture {name}", value)
        for name, value in vars(type(instance)).items() if instance is not None else ():
            self._keep(f"the class's {name}", value)
        self._folder = arguments.get("tmp_path")
        self._files = set(self._folder.iterdir()) if isinstance(self._folder, Path) else set()

    def _keep(self, name: str, value: Any) -> None:
        """Copy a container, or the attributes of an object of the user's own class."""
        target = value
        if not isinstance(value, _CONTAINERS):
            kind = type(value)
            is_own = getattr(sys.modules.get(kind.__module__), "__file__", None) is not None and "-packages" not in str(
                vars(sys.modules[kind.__module__]).get("__file__")
            )
            if not is_own or isinstance(value, type) or not hasattr(value, "__dict__") or callable(value):
                return
            if kind.__module__.partition(".")[0] in ("distsim", "_pytest", "pytest", *sys.stdlib_module_names):
                return
            target = vars(value)
        with contextlib.suppress(Exception):  # what cannot be copied is seen by the repeated runs
            self._originals.setdefault(id(target), (name, target, copy.deepcopy(target)))

    @property
    def changed(self) -> list[str]:
        """Return the names of what differs now from its copy."""
        counters = [name for name, counter, text in self._counters if repr(counter) != text]
        return [name for name, value, original in self._originals.values() if not _equal(value, original)] + counters

    def restore(self) -> None:
        """Put everything back."""
        for _, value, original in self._originals.values():
            if not _equal(value, original):
                _fill(value, copy.deepcopy(original))
        if isinstance(self._folder, Path) and self._folder.is_dir():
            for path in set(self._folder.iterdir()) - self._files:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _equal(value: Any, original: Any) -> bool:
    try:
        return bool(value == original) and repr(value) == repr(original)
    except Exception:  # tensors inside: their comparison is no truth value
        return False


def _fill(value: Any, original: Any) -> None:
    """Give a container the contents of another one."""
    if isinstance(value, bytearray):
        value[:] = original
        return
    value.clear()
    if isinstance(value, dict | set):
        value.update(original)
    else:
        value.extend(original)
