"""Process settings (rlimit, nice, affinity) that are recorded, and the usage that argparse prints once."""

from __future__ import annotations

import argparse
import faulthandler
import functools
import os
import resource
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distsim.sim.isolation.process import current_task
from distsim.sim.kernel.task import current_process

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess

# -- What a program sets for its process and the machine would apply to all ranks, and to what simulates them.
#
# A timer of faulthandler's that ends the process, a limit, a priority, the cores it may use: a simulated rank
# is told what it has set when it asks, and nothing happens.

_FAULTHANDLER = ("enable", "disable", "register", "unregister", "dump_traceback_later", "cancel_dump_traceback_later")
"""Functions of faulthandler that a simulation ignores: it reports hangs itself, and the watchdog, which uses these
functions, reports crashes and ranks that hold the interpreter lock."""


def _without_effect(real: Callable[..., Any], answer: Any = None) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs) if current_process() is None else answer

    return call


def _pair(get: Callable[..., Any], put: Callable[..., Any], name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a getter and a setter of a setting that is recorded and not applied.

    Values are stored and looked up by the first argument.
    """

    def ask(key: Any, *rest: Any) -> Any:
        process = current_process()
        if process is not None and (name, key) in process.unarmed:
            return process.unarmed[name, key]
        return get(key, *rest)

    def remember(*args: Any) -> Any:
        process = current_process()
        if process is None:
            return put(*args)
        process.unarmed[name, args[0]] = args[-1]
        return None

    return ask, remember


def unarmed_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement)."""
    getlimit, setlimit = _pair(resource.getrlimit, resource.setrlimit, "limit")
    real_getcores = getattr(os, "sched_getaffinity", None)

    def cores(pid: int) -> set[int]:
        process = current_process()
        if process is not None and process.port.core.all is not None and pid in (0, os.getpid()):
            return set(process.port.core.all)  # not the one that the simulator holds its threads to
        assert real_getcores is not None
        result: set[int] = real_getcores(pid)
        return result

    of_cores: list[tuple[Any, str, Any]] = []
    if real_getcores is not None:  # not on macOS
        getcores, setcores = _pair(cores, os.sched_setaffinity, "cores")
        of_cores = [(os, "sched_getaffinity", getcores), (os, "sched_setaffinity", setcores)]
    return [
        *((faulthandler, name, _without_effect(getattr(faulthandler, name))) for name in _FAULTHANDLER),
        (os, "nice", _without_effect(os.nice, 0)),
        (os, "setpriority", _without_effect(os.setpriority)),
        *of_cores,
        (resource, "getrlimit", getlimit),
        (resource, "setrlimit", setlimit),
    ]


_told: weakref.WeakKeyDictionary[Any, dict[str, SimProcess]] = weakref.WeakKeyDictionary()
"""Messages that were printed, with the process that caused each, by world."""


def usage_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for code that prints the process's settings."""
    real: Any = argparse.ArgumentParser._print_message

    @functools.wraps(real)
    def print_message(self: Any, message: str, file: Any = None) -> None:
        task = current_task()
        if task is not None and message and not task.process.calls.count:
            if _told.setdefault(task.port, {}).setdefault(message, task.process) is not task.process:
                return
        real(self, message, file)

    return [(argparse.ArgumentParser, "_print_message", print_message)]
