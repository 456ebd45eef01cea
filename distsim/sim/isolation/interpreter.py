"""State of the interpreter, kept for each process and exchanged with the baton."""

from __future__ import annotations

import logging
import os
import sys
from collections import ChainMap
from itertools import compress
from operator import getitem, is_not
from types import ModuleType
from typing import Any

import torch

from distsim.sim.isolation.global_flags import PLACES, HostState, Switch
from distsim.sim.isolation.modules.modules import ModuleTable
from distsim.sim.isolation.output import SharedCache, is_made_for_all
from distsim.sim.isolation.torch_state.torch_state import Own

_set_torch_rng, _get_torch_rng = torch.default_generator.set_state, torch.default_generator.get_state
_real_putenv, _real_unsetenv = os.putenv, os.unsetenv
_real_shutdown = logging.shutdown
_manager = logging.Logger.manager
_module: dict[str, Any] = vars(logging)
"""Past `__setattr__`, which shared modules have while a simulation runs."""

# -- Environment variables.


def enter_environ(data: dict[bytes, bytes], changed: dict[bytes, None]) -> None:
    """Load a process's environment into `os.environ`, and its own *changed* variables into C's environment."""
    os.environ._data = os.environb._data = data  # type: ignore[attr-defined]
    for key in changed:
        _put(key, data.get(key))


def leave_environ(host: dict[bytes, bytes], changed: dict[bytes, None]) -> None:
    """Restore the *host*'s environment."""
    os.environ._data = os.environb._data = host  # type: ignore[attr-defined]
    for key in changed:
        _put(key, host.get(key))


def _put(key: bytes, value: bytes | None) -> None:
    if value is None:
        _real_unsetenv(key)
    else:
        _real_putenv(key, value)


# -- Attributes of modules that programs assign.

_SPACES: tuple[dict[str, Any], ...] = tuple(vars(holder) for holder, _ in PLACES)
_NAMES = tuple(name for _, name in PLACES)
"""Names of the places in their dictionaries, which avoids the `__setattr__` of modules that are watched in a
simulation.
"""
_NUMBERS = range(len(PLACES))


def enter_places(values: list[Any]) -> None:
    """Write *values* into the attributes of the settings."""
    for number in compress(_NUMBERS, map(is_not, map(getitem, _SPACES, _NAMES), values)):
        _SPACES[number][_NAMES[number]] = values[number]


def leave_places(values: list[Any], shared: list[Any]) -> None:
    """Save the values of the places into *values*, and restore the *shared* ones."""
    values[:] = map(getitem, _SPACES, _NAMES)
    for number in compress(_NUMBERS, map(is_not, values, shared)):
        _SPACES[number][_NAMES[number]] = shared[number]


def exchange_places(leaving: list[Any], coming: list[Any]) -> None:
    """Save the values of the places into *leaving*, and write those of *coming*."""
    leaving[:] = map(getitem, _SPACES, _NAMES)
    for number in compress(_NUMBERS, map(is_not, leaving, coming)):
        _SPACES[number][_NAMES[number]] = coming[number]


# -- The state of `logging`.


class _Loggers(ChainMap[str, Any]):
    """Mapping of logger names that looks up the process's own loggers first, then those of the surrounding program."""

    def __setitem__(self, name: str, logger: Any) -> None:
        if is_made_for_all():
            if isinstance(logger, logging.Logger):
                logger._cache = SharedCache()  # type: ignore[attr-defined]
            self.maps[-1][name] = logger
        else:
            self.maps[0][name] = logger


class LogState:
    """The logging module as one process left it."""

    def __init__(self) -> None:
        root = dict(logging.root.__dict__)
        root.update(handlers=list(logging.root.handlers), filters=list(logging.root.filters), _cache={})
        self.root = root
        self.manager = dict(_manager.__dict__)
        self.manager["loggerDict"] = _Loggers({}, _manager.loggerDict)
        self.handlers: Any = logging._handlers.copy()  # type: ignore[attr-defined]
        self.handler_list: list[Any] = list(logging._handlerList)  # type: ignore[attr-defined]
        self._found = list(self.handler_list)
        self.shared: dict[logging.Logger, dict[str, Any]] = {}

    def swap(self) -> None:
        """Exchange this state with that of the logging module. Calling it twice restores both."""
        root = logging.root
        root.__dict__, self.root = self.root, root.__dict__
        _manager.__dict__, self.manager = self.manager, _manager.__dict__
        module = _module
        module["_handlers"], self.handlers = self.handlers, module["_handlers"]
        module["_handlerList"], self.handler_list = self.handler_list, module["_handlerList"]
        for logger, state in self.shared.items():
            logger.__dict__, self.shared[logger] = state, logger.__dict__

    def follow(self, other: LogState) -> None:
        """Switch output, like `other.swap()` and `swap()`: *other*'s state is saved."""
        if other.shared or self.shared:
            other.swap()
            self.swap()
            return
        root, module = logging.root, _module
        other.root, root.__dict__, self.root = root.__dict__, self.root, other.root
        other.manager, _manager.__dict__, self.manager = _manager.__dict__, self.manager, other.manager
        other.handlers, module["_handlers"], self.handlers = module["_handlers"], self.handlers, other.handlers
        other.handler_list, module["_handlerList"], self.handler_list = (
            module["_handlerList"],
            self.handler_list,
            other.handler_list,
        )

    def shut_down(self) -> None:
        """Flush and close the log handlers that the process created, as Python does at exit."""
        handlers: list[Any] = logging._handlerList  # type: ignore[attr-defined]
        if handlers != self._found:  # it is a comparison with each of them for each
            _real_shutdown([handler for handler in handlers if handler not in self._found])

    def configure(self, logger: logging.Logger) -> None:
        """Give the running process its own copy of *logger* before it changes a shared one."""
        if logger is logging.root or logger in self.shared or not isinstance(logger, logging.Logger):
            return
        own = _manager.loggerDict.maps[0]  # type: ignore[attr-defined]
        if own.get(logger.name) is logger:
            return
        state = dict(logger.__dict__)
        state.update(handlers=list(logger.handlers), filters=list(logger.filters), _cache={})
        self.shared[logger] = logger.__dict__
        logger.__dict__ = state


# -- All of it.


class InterpreterState:
    """What one process has changed of the interpreter. *host* is what surrounds the simulation."""

    def __init__(self, host: HostState, environ: dict[bytes, bytes], argv: list[str], torch_rng: torch.Tensor) -> None:
        self.host = host
        self.environ = environ
        """Environment variables, like `os.environb`."""
        self.changed_environ: dict[bytes, None] = {}
        """Variables that the process set or removed itself."""
        self.environ_defaults: dict[bytes, bytes] = {}
        """Variables that `os.environ.setdefault` would have set without torchrun."""
        self.told_of_torchrun = False
        """Whether the process asked torch if torchrun started it, and the answer was yes."""
        self.places = host.first_places()
        self.switches: dict[Switch, Any] = {}
        """Positions of the switches that the process turned."""
        self.logs: LogState | None = None
        self.argv = argv
        self.sys_path = list(sys.path)
        self.modules: ModuleTable | None = None
        self.main: ModuleType | None = None
        self.torch_rng: torch.Tensor | None = None
        self.torch_own = Own()
        """Parts of torch's state that the process has changed (torch_state.py)."""
        self._first_torch_rng = torch_rng

    def begin(self) -> None:
        """Initialize the process with the state of the surrounding program, which is active. The first `enter` calls
        this, too.
        """
        self.modules, self.logs = ModuleTable(self.host.imports), LogState()
        self.torch_rng = self._first_torch_rng

    def enter(self) -> None:
        """Load this process's state into Python and torch."""
        if self.modules is None:
            self.begin()
        assert self.modules is not None
        assert self.logs is not None
        self.modules.enter()
        enter_environ(self.environ, self.changed_environ)
        sys.argv = self.argv
        enter_places(self.places)
        sys.path[:] = self.sys_path
        self.logs.swap()
        for switch in self.host.turned:
            if switch in self.switches:
                switch.set(self.switches[switch])
        _set_torch_rng(self.torch_rng)
        self.host.torch.enter(self.torch_own)

    def leave(self) -> None:
        """Save the changes of the process and unload its state."""
        leave_environ(self.host.environ, self.changed_environ)
        self.argv = sys.argv
        leave_places(self.places, self.host.places)
        self.sys_path = list(sys.path)
        if self.logs is not None:
            self.logs.swap()
        for switch, shared in self.host.turned.items():
            if switch in self.switches:
                self.switches[switch] = switch.get()
                switch.set(shared)
        self.torch_rng = _get_torch_rng()
        self.host.torch.leave(self.torch_own)
        if self.modules is not None:
            self.modules.leave()

    def follow(self, other: InterpreterState) -> None:
        """Switch processes, like `other.leave()` and `enter()`, without touching places that are equal in both."""
        host = self.host
        if self.modules is None or other.modules is None or self.logs is None or other.logs is None or host.turned:
            other.leave()
            self.enter()
            return
        if other.changed_environ:
            leave_environ(host.environ, other.changed_environ)
        enter_environ(self.environ, self.changed_environ)
        other.argv, sys.argv = sys.argv, self.argv
        exchange_places(other.places, self.places)
        other.sys_path = list(sys.path)
        sys.path[:] = self.sys_path
        self.logs.follow(other.logs)
        other.torch_rng = _get_torch_rng()
        _set_torch_rng(self.torch_rng)
        self.modules.follow(other.modules)
        host.torch.follow(other.torch_own, self.torch_own)
