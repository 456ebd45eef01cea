"""Process settings (rlimit, nice, affinity) that are recorded, and the usage that argparse prints once."""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distsim.sim.isolation.for_ranks import patch_for_ranks
from distsim.sim.isolation.modules.patch_table import Patch
from distsim.sim.isolation.process import RankTask, require_task

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess

# -- What a program sets for its process and the machine would apply to all ranks, and to what simulates them.
#
# A timer of faulthandler's that ends the process, a limit, a priority, the cores it may use: a simulated rank
# is told what it has set when it asks, and nothing happens.

_FAULTHANDLER = ("enable", "disable", "register", "unregister", "dump_traceback_later", "cancel_dump_traceback_later")
"""Functions of faulthandler that a simulation ignores: it reports hangs itself, and the watchdog, which uses these
functions, reports crashes and ranks that hold the interpreter lock."""


def _without_effect(holder: Any, name: str, answer: Any = None) -> Patch:
    return patch_for_ranks(holder, name, lambda *_, **__: answer)


def _recorded(holder: Any, get: str, put: str, real_get: Callable[..., Any]) -> list[Patch]:
    """Return the patches of a getter and a setter, whose setting is recorded by its first argument and not applied."""

    def ask(task: RankTask, key: Any, *rest: Any) -> Any:
        settings = task.process.unarmed
        return settings[put, key] if (put, key) in settings else real_get(key, *rest)

    def remember(task: RankTask, *args: Any) -> None:
        task.process.unarmed[put, args[0]] = args[-1]

    return [patch_for_ranks(holder, get, ask), patch_for_ranks(holder, put, remember)]


def unarmed_patches() -> list[Patch]:
    """Return patches (holder, attribute, replacement)."""
    real_getcores = getattr(os, "sched_getaffinity", None)

    def cores(pid: int) -> Any:
        all_cores = require_task().port.core.all
        if all_cores is not None and pid in (0, os.getpid()):
            return set(all_cores)  # not the one that the simulator holds its threads to
        return real_getcores(pid)  # type: ignore[misc]

    return [
        *(_without_effect(faulthandler, name) for name in _FAULTHANDLER),
        _without_effect(os, "nice", 0),
        _without_effect(os, "setpriority"),
        *([] if real_getcores is None else _recorded(os, "sched_getaffinity", "sched_setaffinity", cores)),  # not macOS
        *_recorded(resource, "getrlimit", "setrlimit", resource.getrlimit),
    ]


_told: weakref.WeakKeyDictionary[Any, dict[str, SimProcess]] = weakref.WeakKeyDictionary()
"""Messages that were printed, with the process that caused each, by world."""


def usage_patches() -> list[Patch]:
    """Return patches (holder, attribute, replacement) for code that prints the process's settings."""
    real: Any = argparse.ArgumentParser._print_message

    def print_message(task: RankTask, self: Any, message: str, file: Any = None) -> None:
        if message and not task.process.calls.count:
            if _told.setdefault(task.port, {}).setdefault(message, task.process) is not task.process:
                return
        real(self, message, file)

    return [patch_for_ranks(argparse.ArgumentParser, "_print_message", print_message)]
