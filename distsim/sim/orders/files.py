"""Files in an exploration: the order in which ranks look at, write, rename and remove them is a choice."""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import functools
import io
import linecache
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from distsim.debug.records.frames import STANDARD, is_ours
from distsim.errors import NotSimulated
from distsim.sim.isolation.process import current_task
from distsim.sim.kernel.steps import Access
from distsim.sim.kernel.turns import Caller, TurnRequest, asking_line

_OF_FILES = frozenset({"contextlib", "genericpath", "glob", "gzip", "os", "pathlib", "posixpath", "shutil", "zipfile"})
"""Modules of the standard library that access files because the program asks them to."""
PACKAGES = "site-packages"
_real_readlink = os.readlink
_WRITING = frozenset("wax+")
"""Letters of a mode in which a file is written."""
_FUNCTIONS: list[tuple[Any, tuple[str, ...], Access, int]] = [
    (os, ("stat", "lstat", "access", "readlink", "listdir", "scandir"), Access.READ, 1),
    (os, ("mkdir", "rmdir", "remove", "unlink", "truncate", "utime", "chmod"), Access.WRITE, 1),
    (os, ("rename", "replace", "link", "symlink"), Access.WRITE, 2),
]
"""Functions of a module, how they access their first arguments, and how many of them are paths."""


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Return a context in which accesses of files that the program's own lines make wait for their turn.

    Those that torch makes for itself do not; `torch.save` and `torch.load` are one access each.
    """
    places: list[tuple[Any, str, Callable[..., dict[str, Access]]]] = [
        (holder, name, functools.partial(_paths, access, count))
        for holder, names, access, count in _FUNCTIONS
        for name in names
    ]
    places += [(builtins, "open", _opened), (io, "open", _opened), (os, "open", _opened_by_number)]
    places += [(torch, "save", _saved), (torch, "load", functools.partial(_paths, Access.READ, 1))]
    locks = [(fcntl, name, getattr(fcntl, name)) for name in ("flock", "lockf")]
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in places]
    for (holder, name, objects_of), (_, _, real) in zip(places, before, strict=True):
        setattr(holder, name, _replacement(real, name, objects_of))
    for holder, name, real in locks:
        setattr(holder, name, _refused(real, name))
    try:
        yield
    finally:
        for holder, name, real in (*before, *locks):
            setattr(holder, name, real)


def _replacement(real: Callable[..., Any], name: str, objects_of: Callable[..., dict[str, Access]]) -> Any:
    @functools.wraps(real)
    def access(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        turns = None if task is None else task.port.facts.turns
        caller = None if turns is None else _accessing_line(sys._getframe(1))
        if task is not None and turns is not None and caller is not None:
            paths = objects_of(args, kwargs)
            objects: dict[Hashable, Access] = {}
            for path, how in paths.items():
                objects["file", path] = how
                if how is Access.WRITE:  # it may come or go
                    objects.setdefault(("file", os.path.dirname(path)), Access.ADD)
            if objects and name == "open" and _stays_open(caller, objects):
                turns.does("writes to a file that it keeps open", sys._getframe(1))
            if objects:
                label = f"{name} {', '.join(map(os.path.basename, paths))}"
                is_look = Access.WRITE not in objects.values()
                turns.ask(task, TurnRequest(label, caller.line, objects, is_look=is_look), None, None, explicit=False)
        return real(*args, **kwargs)

    return access


def _refused(real: Callable[..., Any], name: str) -> Any:
    """Return *real* for others than ranks that explore: it would wait for a rank that has no turn."""

    @functools.wraps(real)
    def lock(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is not None and task.port.facts.turns is not None:
            raise NotSimulated(f"fcntl.{name} in an exploration", "let a store or a barrier order the ranks")
        return real(*args, **kwargs)

    return lock


def _stays_open(caller: Caller, objects: Mapping[Hashable, Access]) -> bool:
    """Return whether the line opens a file for writing that it does not close itself, as a `with` would: what is
    written later is written at no turn.
    """
    file, _, number = caller.line.rpartition(":")
    full = next((name for name in linecache.cache if name.endswith(file)), file)
    text = linecache.getline(full, int(number)) if number.isdigit() else ""
    return Access.WRITE in objects.values() and re.search(r"\bopen\(", text) is not None and "with " not in text


def _accessing_line(frame: FrameType | None) -> Caller | None:
    """Return the line of the program that accesses a file; None if torch, distsim or an import does it for itself."""
    while frame is not None and _is_standard(frame.f_code.co_filename):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _OF_FILES:
            return None  # such as linecache, which looks once
        frame = frame.f_back
    if frame is None or is_ours(frame.f_code.co_filename):
        return None
    above: FrameType | None = frame
    while above is not None and (is_ours(file := above.f_code.co_filename) or _is_standard(file) or PACKAGES in file):
        if file.startswith("<frozen importlib"):  # a library looks for its own files
            return None
        above = above.f_back
    return asking_line(frame)


def _is_standard(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(STANDARD) and PACKAGES not in file)


def _paths(access: Access, count: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Access]:
    """Return the paths among the first *count* arguments, which are accessed in one way."""
    given = args[:count] or (kwargs.get("path", kwargs.get("f", ".")),)
    names = (_absolute(path, kwargs.get("dir_fd", kwargs.get("src_dir_fd"))) for path in given)
    return {name: access for name in names if name}


def _opened(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Access]:
    mode = args[1] if len(args) > 1 else kwargs.get("mode", "r")
    access = Access.WRITE if _WRITING & set(str(mode)) else Access.READ
    return _paths(access, 1, args or (kwargs.get("file"),), {})


def _opened_by_number(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Access]:
    flags = args[1] if len(args) > 1 else kwargs.get("flags", 0)
    access = Access.WRITE if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) else Access.READ
    return _paths(access, 1, args, kwargs)


def _saved(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Access]:
    return _paths(Access.WRITE, 1, args[1:] or (kwargs.get("f"),), {})


def _absolute(path: Any, folder_fd: int | None) -> str:
    """Return an absolute path; empty for a file that is open, and for a device."""
    if not isinstance(path, str | bytes | os.PathLike):
        return ""
    folder = os.getcwd() if folder_fd is None else _real_readlink(f"/proc/self/fd/{folder_fd}")
    name = os.path.normpath(os.path.join(folder, os.fsdecode(path)))
    return "" if name.startswith(("/proc/", "/dev/", "/sys/")) else name
