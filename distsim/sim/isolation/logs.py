"""`logging` per simulated process: the root logger, the loggers it makes, its handlers.

Loggers of the packages that all processes share are shared like these, whether they were imported before the
simulation or by one of its processes; one that configures such a logger gives it a state of its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import ChainMap
from collections.abc import Iterator
from typing import Any

from distsim.sim.kernel.task import current_process

__all__ = ["LogState", "forget_levels", "log_patches", "made_for_all", "outlive_threads"]

_manager = logging.Logger.manager
_module: dict[str, Any] = vars(logging)
"""Past `__setattr__`, which shared modules have while a simulation runs."""
_real_shutdown = logging.shutdown


class _NoMemory(dict[int, bool]):
    """The cache of a shared logger's `isEnabledFor`: its answer depends on the process, so it keeps none."""

    def __setitem__(self, level: int, enabled: bool) -> None:
        pass


class _Importing(threading.local):
    shared = False
    """The thread imports a module that all processes share."""


_importing = _Importing()


@contextlib.contextmanager
def made_for_all(shared: bool) -> Iterator[None]:
    """The loggers that the calling thread makes meanwhile are everybody's, or, within that, its process' own again."""
    before, _importing.shared = _importing.shared, shared
    try:
        yield
    finally:
        _importing.shared = before


class _Loggers(ChainMap[str, Any]):
    """A process' own by name, before those of the surrounding program."""

    def __setitem__(self, name: str, logger: Any) -> None:
        if _importing.shared:
            if isinstance(logger, logging.Logger):
                logger._cache = _NoMemory()  # type: ignore[attr-defined]
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
        """Exchange this state with what the logging module holds; done twice it is as before."""
        root = logging.root
        root.__dict__, self.root = self.root, root.__dict__
        _manager.__dict__, self.manager = self.manager, _manager.__dict__
        module = _module
        module["_handlers"], self.handlers = self.handlers, module["_handlers"]
        module["_handlerList"], self.handler_list = self.handler_list, module["_handlerList"]
        for logger, state in self.shared.items():
            logger.__dict__, self.shared[logger] = state, logger.__dict__

    def follow(self, other: LogState) -> None:
        """As `other.swap()` and `swap()`: what the surrounding program has, *other* kept until now."""
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
        """As Python does when it exits: flush and close the handlers that the process made."""
        handlers: list[Any] = logging._handlerList  # type: ignore[attr-defined]
        if handlers != self._found:  # it is a comparison with each of them for each
            _real_shutdown([handler for handler in handlers if handler not in self._found])

    def configure(self, logger: logging.Logger) -> None:
        """The running process changes *logger*; a shared one becomes its own."""
        if logger is logging.root or logger in self.shared or not isinstance(logger, logging.Logger):
            return
        own = _manager.loggerDict.maps[0]  # type: ignore[attr-defined]
        if own.get(logger.name) is logger:
            return
        state = dict(logger.__dict__)
        state.update(handlers=list(logger.handlers), filters=list(logger.filters), _cache={})
        self.shared[logger] = logger.__dict__
        logger.__dict__ = state


_LOST_AT_MOST = 10_000
"""More than there will be ranks that end at the moment when another counts the same object."""
_kept: list[object] = []


def outlive_threads() -> None:
    """Before the first rank begins: what torch's C++ lets go of as a thread dies is never the last reference.

    `dtensor_dispatch_logger` and `logging_DEBUG` are `thread_local py::object`s (torch 2.13,
    torch/csrc/autograd/python_variable.cpp), destroyed after Python has let the thread go: their counts of references
    fall without the lock that guards them, beside whichever rank runs. The last reference, or a count that is lost so,
    frees an object without Python, and the process dies of it. The logger is everybody's here, never a rank's."""
    if not _kept:
        _kept.extend([logging.getLogger("torch.distributed.tensor._dispatch"), logging.DEBUG] * _LOST_AT_MOST)


_forgetful: list[Any] = []
"""The loggers that there were, when all had been seen to remember nothing."""


def forget_levels() -> None:
    """A simulation begins: no logger that is there remembers what it is enabled for."""
    loggers = list(_manager.loggerDict.values())
    if loggers == _forgetful:  # as objects: no step of Python's for each
        return
    for logger in loggers:
        if isinstance(logger, logging.Logger) and type(logger._cache) is not _NoMemory:  # type: ignore[attr-defined]
            logger._cache = _NoMemory()  # type: ignore[attr-defined]
    _forgetful[:] = loggers


def log_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of what configures a logger."""

    def shutdown(*handlers: Any) -> None:
        process = current_process()
        if process is None or process.logs is None or handlers:
            _real_shutdown(*handlers)
        else:
            process.logs.shut_down()

    patches: list[tuple[Any, str, Any]] = [
        (holder, name, _configuring(getattr(holder, name)))
        for holder, name in (
            (logging.Logger, "setLevel"),
            (logging.Logger, "addHandler"),
            (logging.Logger, "removeHandler"),
            (logging.Filterer, "addFilter"),
            (logging.Filterer, "removeFilter"),
        )
    ]
    return [*patches, (logging, "shutdown", shutdown)]


def _configuring(real: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        process = current_process()
        if process is not None and process.logs is not None:
            process.logs.configure(self)
        return real(self, *args, **kwargs)

    return call
