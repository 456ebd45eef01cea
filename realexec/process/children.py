"""Processes that a rank starts: further ranks, which are guarded too, and forked children.

mp.spawn, Process and Python subprocesses may start ranks. A forked child (such as a data loader's worker) should not
call its parent's group: its first call is noted for the monitor.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from distsim.debug.evidence.guard_findings import write_note
from distsim.debug.records.arguments import FIELDS
from distsim.debug.records.frames import program_frames, steps

Run = Callable[[Mapping[str, Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Function that runs a target in a new process under the guard: (settings, target, arguments, keyword arguments). It
is a function of a module, so that it can be pickled.
"""
OPERATIONS = {method: op for op, fields in FIELDS.items() for method in fields.methods}
"""Operation of torch.distributed, by the method of a process group that performs it."""


class GuardedChild:
    """Target of a new process that runs the original target under the guard, with the settings of the parent."""

    def __init__(self, run: Run, given: Mapping[str, Any], target: Callable[..., Any]) -> None:
        self.run = run
        self.given = dict(given)
        self.target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.given, self.target, args, kwargs)


class SpawnHook:
    """Patches `Process.start` so that new ranks are guarded. Other processes (a data loader's workers) are not
    changed.
    """

    def __init__(self, run: Run, given: Mapping[str, Any], is_rank: Callable[[], bool]) -> None:
        self._run = run
        self._given = dict(given)
        self._is_rank = is_rank
        self._original: Any = None

    def install(self) -> None:
        self._original = original = BaseProcess.start

        @functools.wraps(original)
        def start(process: Any) -> None:
            if not self._is_rank():
                self._guard(process)
            original(process)

        self._ours = start
        kind: Any = BaseProcess
        kind.start = start

    def remove(self) -> None:
        kind: Any = BaseProcess
        if kind.start is self._ours:
            kind.start = self._original

    def _guard(self, process: Any) -> None:
        target, args = process._target, process._args
        if target is None:  # run() of a subclass
            return
        # mp.spawn's own target turns an exception into an exit code: the user's function is the one to guard.
        if getattr(target, "__module__", "") == "torch.multiprocessing.spawn" and args and callable(args[0]):
            process._args = (GuardedChild(self._run, self._given, args[0]), *args[1:])
        else:
            process._target = GuardedChild(self._run, self._given, target)


def guarded_command(command: Any, environ: Any) -> list[Any] | None:
    """Return the command that runs a rank under the guard, or None if *command* starts no rank or is not understood.

    A launcher inside a program (such as Lightning's) starts `python script` again with the variables of another
    rank. A helper process inherits the variables of its own rank.
    """
    if not isinstance(command, (list, tuple)) or len(command) < 2 or command[0] != sys.executable or environ is None:
        return None
    try:
        numbers = [environ.get(name) for name in ("RANK", "LOCAL_RANK")]
        if int(environ.get("WORLD_SIZE") or 1) < 2 or not any(numbers):
            return None
    except (AttributeError, ValueError):
        return None
    if numbers == [os.environ.get(name) for name in ("RANK", "LOCAL_RANK")]:
        return None
    at = 2 if command[1] == "-u" else 1
    script = command[at] if len(command) > at else ""
    starts = script == "-m" or (isinstance(script, str) and not script.startswith("-") and os.path.isfile(script))
    if not starts or list(command[at : at + 2]) == ["-m", "distsim.debug"]:
        return None
    return [*command[:at], "-m", "distsim.debug", *command[at:]]


class PopenHook:
    """Patches `subprocess.Popen` so that another rank of this program is guarded with the same *settings*."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._settings = dict(settings)
        self._original: Any = None

    def install(self) -> None:
        self._original = original = subprocess.Popen.__init__
        settings = self._settings

        @functools.wraps(original)
        def init(popen: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
            command = guarded_command(args, kwargs.get("env"))
            if command is not None:
                args, kwargs["env"] = command, {**kwargs["env"], **settings}
            original(popen, args, *rest, **kwargs)

        self._ours = init
        kind: Any = subprocess.Popen
        kind.__init__ = init

    def remove(self) -> None:
        kind: Any = subprocess.Popen
        if kind.__init__ is self._ours:
            kind.__init__ = self._original


class InheritedGroup:
    """Replacement for the C++ group *inner* in a forked child of the rank that owns *ring*."""

    def __init__(self, inner: Any, ring: Path) -> None:
        self._inner = inner
        self._ring = ring

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in OPERATIONS:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return value(*args, **kwargs)

        return call

    def note(self, name: str) -> None:
        """Note in the ring that the child called the method *name*."""
        with contextlib.suppress(Exception):  # a full disk, say: the program goes on as it would
            stack = program_frames(steps(sys._getframe(2)))
            write_note(self._ring.parent, self._ring.name, os.getpid(), OPERATIONS[name], stack)
