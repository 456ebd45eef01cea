"""Classifies the lines of a program: the user's own, an installed library's, or machinery.

This is the only definition, for simulated and real runs, for stacks of live ranks and for those in dumps. A report
names the innermost line of the user's code, however deep below it the call was made; the line of the installed
library that made it is shown beside it (`Site.through`). If no frame is the user's (a program that is itself an
installed package), the outermost frame of a library is used.
"""

from __future__ import annotations

import enum
import importlib.util
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any

from msgspec.structs import replace

from distsim.debug.records import Site
from distsim.debug.records.circumstances import BACKWARD, DDP, EXIT_HANDLER, REDUCER, handled_signal, label
from distsim.torch_compat.rpc import ASYNC_EXECUTION

DEPTH = 16
"""Largest number of the user's frames that are stored with a call."""

Frame = tuple[str, int, str]
"""File, line, function."""


class Owner(enum.IntEnum):
    """Owner of the code in a file."""

    MACHINERY = 0
    """torch, distsim, the standard library, and the program that started the script."""
    LIBRARY = 1
    """Installed: site-packages, dist-packages."""
    USER = 2
    """All other code: a script, a module beside it, an editable install, a notebook cell, or interactive input."""


TYPED = ("<string>", "<stdin>", "<console>", "<ipython-input-", "<python-input-", "<doctest ", "<torch_package_")
"""Names of code that a user gave without a file; other names in brackets belong to generated code."""
INSTALLED = ("/site-packages/", "/dist-packages/")
STDLIB = re.compile(r"/lib(64)?/python3\.\d+/")
TORCH_ABROAD = re.compile(r"/torch/(distributed|nn|optim|autograd|utils|_\w+|(functional|serialization|storage)\.py)")
"""Pattern of torch's files in a dump from another machine, where torch may be installed anywhere."""
TORCHS_TESTS = "/torch/testing/_internal/"
"""Programs that happen to lie among torch's modules."""
ASYNCHRONOUS = "/torch/distributed/checkpoint/"
"""Part of torch that runs in threads of its own.

Functions that a program passes to a thread do not belong here, nor do hooks and callbacks, which run in changing
threads.
"""
SPAWNERS = ("/multiprocessing/spawn.py", "/multiprocessing/forkserver.py", "/execnet/gateway_base.py")


def _machinery() -> tuple[str, ...]:
    """Return the folders of torch, distsim and the standard library."""
    folders = {*_ours()}
    paths = sysconfig.get_paths()
    folders.update(os.path.join(paths[scheme], "torch") for scheme in ("purelib", "platlib"))
    if (file := _torch_file()) is not None:
        folders.add(os.path.dirname(file))
    return tuple(sorted(folder.rstrip("/") + "/" for folder in folders))


def _torch_file() -> str | None:
    """Return the folder of torch without an import, which a monitor avoids."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.__file__
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None else None


def _ours() -> tuple[str, ...]:
    """Return the folders of distsim. In a checkout, the same files are also found through links."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders: set[str] = set()
    for folder in {here, os.path.realpath(here)}:
        above = os.path.dirname(folder)
        checkout = os.path.isfile(f"{above}/distsim/__init__.py")
        folders.update(f"{above}/{name}/" for name in ("debug", "distsim", "realexec") if checkout)
        folders.update(() if checkout else (f"{above}/",))
    return tuple(sorted(folders))


def _working_folder() -> str:
    """Return the working folder, or the root if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.sep


@lru_cache(maxsize=1)
def installed_here() -> tuple[str, ...]:
    """Return the folders of installed packages.

    These are the folders of this environment, those of another one that a .pth file or PYTHONPATH adds, and those in
    which a package is beside pip's metadata (`pip install --target`).
    """
    paths = sysconfig.get_paths()
    folders = {paths["purelib"], paths["platlib"], site.getusersitepackages(), *site.getsitepackages()}
    candidates = {os.path.abspath(entry) for entry in sys.path} - {_working_folder()}
    if (file := _torch_file()) is not None:
        candidates.add(os.path.dirname(os.path.dirname(file)))
    for folder in candidates:
        with suppress(OSError):  # in an archive
            if f"{folder}/".endswith(INSTALLED) or any(name.endswith(".dist-info") for name in os.listdir(folder)):
                folders.add(folder)
    return tuple(sorted(folder.rstrip("/") + "/" for folder in folders))


OURS = _ours()
STANDARD = tuple(sorted({sysconfig.get_path(scheme).rstrip("/") + "/" for scheme in ("stdlib", "platstdlib")}))
SCRIPTS = sysconfig.get_path("scripts").rstrip("/") + "/"
"""Console scripts of installed packages: a few lines that call them."""

_machines: tuple[str, ...] = ()
_home = _working_folder()


@cache
def owner(file: str, *, abroad: bool = False) -> Owner:
    """Return the owner of *file*. *abroad*: the file is on another machine, so only its path is known."""
    global _machines
    if not file or file.startswith("<"):
        return Owner.USER if file.startswith(TYPED) else Owner.MACHINERY
    if not _machines:
        _machines = _machinery()
    path = absolute(file)
    if TORCHS_TESTS in path:
        return Owner.LIBRARY
    if path.startswith(_machines) or (abroad and TORCH_ABROAD.search(path)):
        return Owner.MACHINERY
    if path.startswith(installed_here()) or any(part in path for part in INSTALLED):
        return Owner.MACHINERY if path.endswith("/typing_extensions.py") else Owner.LIBRARY
    if path.startswith(STANDARD) or (abroad and STDLIB.search(path)):
        return Owner.MACHINERY
    if path.startswith(SCRIPTS) and not path.endswith(".py"):
        return Owner.MACHINERY
    return Owner.USER


def is_ours(file: str) -> bool:
    """Return whether *file* belongs to distsim."""
    return file.startswith(OURS)


# One form of a path ------------------------------------------------------------------------------


@contextmanager
def shown_from(folder: str) -> Iterator[None]:
    """Name files below *folder*, the working folder in which a run starts, relative to it; afterwards as before: who
    judges other runs in this process finds their files."""
    before = _home
    _call_home(folder)
    try:
        yield
    finally:
        _call_home(before)


def _call_home(folder: str) -> None:
    global _home
    if folder != _home:
        _home = folder
        for known in (shown, owner, _site):
            known.cache_clear()


def absolute(file: str) -> str:
    """Return the path of a file that a site names."""
    return file if file.startswith("<") else os.path.normpath(os.path.join(_home, file))


@cache
def shown(file: str) -> str:
    """Return *file* as reports name it: relative to the working folder if it is below it."""
    return absolute(file).removeprefix(_home.rstrip("/") + "/")


def packaged(file: str) -> str:
    """Return the path of a file within its library: `torchmetrics/utilities/distributed.py`."""
    for part in INSTALLED:
        file = file.rpartition(part)[2]
    return file


# Stacks ------------------------------------------------------------------------------------------


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a live stack, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def steps(frame: FrameType | None) -> Iterator[Frame]:
    """Yield a live stack, innermost frame first."""
    for one in outward(frame):
        code = one.f_code
        yield code.co_filename, one.f_lineno or code.co_firstlineno, code.co_qualname
        if name := handled_signal(one):
            yield f"<signal handler {name}>", 0, ""


def program_frames(stack: Iterable[Frame], *, depth: int = DEPTH, abroad: bool = False) -> tuple[Site, ...]:
    """Return the user's frames of *stack*, both innermost first; the first one knows the library's line below it, and
    each one the circumstances in which it made the call below it.

    Without a frame of the user's: the outermost of a library; empty if there is none of these either.
    """
    frames: list[Site] = []
    through: Frame | None = None
    stand_in: Frame | None = None
    stack = list(stack)
    typed = _typed(stack)
    labels: list[str] = []
    within_ours = True
    for frame in stack:
        file = frame[0]
        whose = owner(file, abroad=abroad)
        if whose is Owner.MACHINERY:
            name = label(file, frame[2])
            if within_ours and name == BACKWARD and frame[2] == REDUCER:
                labels.append(DDP)
            if name and name not in labels:
                labels.append(name)
            within_ours = within_ours and is_ours(file)
            continue
        within_ours = False
        if whose is Owner.USER and (typed or file != TYPED[0]):
            frames.append(_site(frame, tuple(labels)))
            labels.clear()
            if len(frames) == depth:
                break
        elif whose is Owner.LIBRARY and not frames:
            through = through or frame
            stand_in = frame
    if EXIT_HANDLER in labels and frames:  # Python called the outermost one
        frames[-1] = replace(frames[-1], inside=(*frames[-1].inside, EXIT_HANDLER))
    if not frames and stand_in is not None:
        frames.append(_site(stand_in))
        through = None if through == stand_in else through
    if frames and through is not None:
        frames[0] = replace(frames[0], through=_site(through))
    return tuple(frames)


def torchs_thread(stack: Iterable[Frame]) -> tuple[Site, ...]:
    """Return torch's outermost frame in a thread that torch started itself (an asynchronous checkpoint) if no frame of
    *stack* is the user's; otherwise empty."""
    stack = list(stack)
    if not stack or not stack[-1][2].endswith("_bootstrap"):
        return ()
    outermost = next((frame for frame in reversed(stack) if "/torch/" in frame[0] and not is_ours(frame[0])), None)
    if outermost is None or ASYNCHRONOUS not in outermost[0]:
        return ()
    return (_site(outermost),)


_known: dict[tuple[int, ...], tuple[tuple[Site, ...], list[CodeType]]] = {}
"""Sites by the identity of each frame's code and position, with the code objects, which are thereby kept alive.

A program reaches few positions from few others.
"""
_KNOWN_MAX = 4_096


def frame_of(ident: int | None) -> FrameType | None:
    """Return the frame in which a thread is.

    Whoever keeps `sys._current_frames()` in a variable keeps its own frame, too: that circle would hold the program's
    tensors until Python collects it.
    """
    return sys._current_frames().get(ident or 0)


def user_stack(frame: FrameType | None = None) -> tuple[Site, ...]:
    """Return the user's frames of this thread, or of *frame*, innermost first."""
    return program_frames(steps(sys._getframe(1) if frame is None else frame))


def call_stack(frame: FrameType) -> tuple[Site, ...]:
    """Return the stack of the call of *frame*: the user's frames, or torch's if one of its threads makes the call."""
    places: list[int] = []
    add = places.append
    walk: FrameType | None = frame
    while walk is not None:
        add(id(walk.f_code))
        add(walk.f_lasti)
        walk = walk.f_back
    key = tuple(places)
    known = _known.get(key)
    if known is None:
        if len(_known) >= _KNOWN_MAX:
            _known.clear()
        codes = [one.f_code for one in outward(frame)]
        known = _known[key] = (user_stack(frame) or torchs_thread(steps(frame)), codes)
    return known[0]


def forget_stacks() -> None:
    """Clear the cache of stacks after a simulation, because files may have other names in the next."""
    _known.clear()


def _typed(stack: Sequence[Frame]) -> bool:
    """Return whether the program is the argument of `python -c`.

    Dataclasses and named tuples make `<string>` code, too, and a spawned process or one of pytest-xdist begins in
    such lines.
    """
    if not stack or stack[-1][0] != TYPED[0]:
        return False
    called = next((frame[0] for frame in reversed(stack) if frame[0] != TYPED[0]), "")
    return not called.endswith(SPAWNERS)


def raised_at(trace: TracebackType | None) -> tuple[Site, ...]:
    """Return the user's frames of a traceback, innermost first."""
    frames: list[Frame] = []
    for frame, line in walk_tb(trace):
        if name := handled_signal(frame):
            frames.append((f"<signal handler {name}>", 0, ""))
        frames.append((frame.f_code.co_filename, line or frame.f_code.co_firstlineno, frame.f_code.co_qualname))
    return program_frames(reversed(frames))


def defined_at(function: Any) -> Site | None:
    """Return the first line of a function of the program; None for other functions."""
    code = getattr(getattr(function, ASYNC_EXECUTION, function), "__code__", None)  # async_execution's
    if code is None or owner(code.co_filename) is Owner.MACHINERY:
        return None
    return Site(shown(code.co_filename), code.co_firstlineno, code.co_qualname)


@lru_cache(maxsize=65536)
def _site(frame: Frame, inside: tuple[str, ...] = ()) -> Site:
    file, line, function = frame
    return Site(shown(file), line, function, inside=inside)


_C10D = ("/distributed_c10d.py", "/c10d_logger.py", "/_functional_collectives.py", "/torch/_ops.py")
_OF_TORCH = (
    "/torch/autograd/graph.py",
    "/torch/nn/parallel/",
    "/torch/nn/modules/_functions.py",
    "/torch/distributed/fsdp/",
    "/torch/distributed/algorithms/",
    "/torch/distributed/optim/",
    "/torch/distributed/utils.py",
)
"""Files of torch that reduce gradients, gather parameters, or synchronize statistics. Calls from them are torch's
and not the program's. The first file calls into C++.
"""


def program_frame(frame: FrameType | None) -> FrameType | None:
    """Return the first frame outside distsim and torch.distributed's public functions."""
    while frame is not None and is_between(frame.f_code):
        frame = frame.f_back
    return frame


@cache
def is_between(code: CodeType) -> bool:
    """Return whether a function is distsim's or one of torch.distributed's public ones, or a context between them."""
    return code.co_filename.endswith((*_C10D, "/contextlib.py")) or is_ours(code.co_filename)


@cache
def is_torchs(code: CodeType) -> bool:
    """Return whether calls of a function are torch's and not the program's."""
    return any(part in code.co_filename for part in _OF_TORCH)
