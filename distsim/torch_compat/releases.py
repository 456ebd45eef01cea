"""Releases of torch that are tested, and what the Python and torch at hand can do.

torch is imported only by a function that is called for it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import signal
import sys
import sysconfig
from pathlib import Path
from typing import Any

from distsim.errors import UsageError
from distsim.text.untrusted_input import read_json
from distsim.torch_compat.names import GUARD, SIM, Need, left_out, unmet

TESTED: dict[Need, tuple[str, ...]] = {
    GUARD: ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0"),
    SIM: ("2.12.0", "2.13.0", "2.14.1", "2.15.0"),
}
"""The releases that tests ran on, oldest first; others of their minors count as tested. pip never sees the newest."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""The releases of Python that tests ran on: the first with each release of torch, others with the suite's own."""
_ALL_PYTHONS = f"{PYTHONS[0]}; on torch 2.13 also {', '.join(PYTHONS[1:])}"
_WHOLE = "on torch 2.13, 2.14 and 2.15"
VERSIONS = (
    (
        "reading records and dumps (`distsim diagnose`)",
        "any, or none",
        "3.11",
        f"the whole suite, {_WHOLE}",
    ),
    (
        "guard of real jobs",
        TESTED[GUARD],
        _ALL_PYTHONS,
        "a program of each kind of fault on gloo (`tests/cases`)",
    ),
    (
        "simulations",
        TESTED[SIM],
        _ALL_PYTHONS,
        f"`tests/conformance`, README's first command, a fault of each kind simulated; the whole suite {_WHOLE}",
    ),
    (
        "simulated GPUs",
        TESTED[SIM],
        _ALL_PYTHONS,
        "README's first command, and each process's own test when torch.cuda begins",
    ),
)
"""For each part: the releases of torch and Python, and what was tested there."""
_PARTS = {GUARD: "the guard of real jobs", SIM: "simulations"}
_TESTED_PART = {GUARD: "the guard of real jobs was", SIM: "simulations were"}


def tested_range(part: Need) -> str:
    """Return the tested releases of *part* (GUARD or SIM), as a message names them: `torch 2.12 to 2.15`."""
    oldest, newest = (".".join(map(str, _minor(TESTED[part][end]))) for end in (0, -1))
    return f"torch {oldest} to {newest}"


def compared(version: str, part: Need) -> int:
    """Return -1 if *version* is older than the tested releases, 0 if it is among them, and 1 if it is newer."""
    oldest, newest = _minor(TESTED[part][0]), _minor(TESTED[part][-1])
    return (_minor(version) > newest) - (_minor(version) < oldest)


def is_tested(version: str, part: Need) -> bool:
    """Return whether tests of *part* ran on the minor release of *version*."""
    return _minor(version) in map(_minor, TESTED[part])


def check_simulation() -> None:
    """Refuse to simulate on a Python or torch that cannot.

    Raises:
        UsageError: in one line, what was expected, what is there, and what to do.
    """
    if is_free_threaded():
        raise UsageError(
            f"expected a Python with a global lock, found a free-threaded build ({sys.version.split()[0]}): simulated "
            "ranks take turns under that lock; use the usual build"
        )
    torch = imported_torch(SIM)
    lacking = _unmet_simulation(torch)
    if lacking:
        raise UsageError(
            f"expected {tested_range(SIM)}, found {torch.__version__}, which lacks what {_PARTS[SIM]} need: "
            f"{', '.join(lacking)}; install one of those releases"
        )


def is_free_threaded() -> bool:
    """Return whether this Python was built without the global interpreter lock."""
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def imported_torch(part: Need) -> Any:
    """torch with torch.distributed.

    Raises:
        UsageError: in one line, why there is none.
    """
    if _failure is not None:  # half of a torch that is imported again and again ends the process
        raise _failure
    try:
        torch = importlib.import_module("torch")
        dist = importlib.import_module("torch.distributed")
    except Exception as error:  # a torch of another machine, or half of one
        raise torch_refusal(error, part) or error from error
    refusal = _without_distributed(torch, dist)
    if refusal is not None:
        raise refusal
    return torch


def torch_refusal(error: Exception, part: Need) -> UsageError | None:
    """Return a line about *error* if torch cannot be imported; None if torch works and the error has another cause.

    After a failed import, parts of torch remain loaded, and a second attempt fails with another error. The line
    therefore contains the first error.
    """
    global _failure
    if _failure is None:
        _failure = _torch_failure(error, part)
    return _failure


_failure: UsageError | None = None


def _torch_failure(error: Exception, part: Need) -> UsageError | None:
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if importlib.util.find_spec("_ctypes") is None:
        return UsageError(
            f"expected a Python with ctypes, found {sys.executable} without: build it again with libffi installed"
        )
    torch = sys.modules.get("torch")
    path = getattr(torch, "__file__", None) or _place_of_torch()
    if path is None and isinstance(error, ModuleNotFoundError):
        return UsageError(f"expected {tested_range(part)}, but torch is not installed: pip install torch")
    others = "".join(f"; another torch is in {folder}" for folder in other_torches())
    try:
        if path and not os.path.exists(os.path.join(os.path.dirname(path), "version.py")):
            return UsageError(f"expected {tested_range(part)}, but {path} hides it: rename that file{others}")
        dist = importlib.import_module("torch.distributed")
        return _without_distributed(importlib.import_module("torch"), dist)
    except Exception:
        return UsageError(
            f"expected {tested_range(part)}, but {path or 'torch'} cannot be imported ({line[:300]}){others}; "
            "install torch again"
        )


def _place_of_torch() -> str | None:
    """Return the file that `import torch` would load."""
    try:
        spec = importlib.util.find_spec("torch")
    except Exception:  # an import hook, or half of a torch
        return None
    return None if spec is None else spec.origin


def _without_distributed(torch: Any, dist: Any) -> UsageError | None:
    if dist.is_available():
        return None
    return UsageError(
        f"expected a torch with torch.distributed, found {torch.__version__} built without it (USE_DISTRIBUTED=0): "
        "install torch with pip"
    )


def guard_refusal() -> str:
    """Return what the guard needs and this torch lacks, in one line; empty if nothing."""
    if not hasattr(signal, "SIGRTMIN"):
        return f"it reads /proc and takes a real-time signal, which Linux has and {sys.platform} has not"
    torch = imported_torch(GUARD)
    lacking = unmet(GUARD)
    names = ", ".join(f"{name.path} ({name.feature})" for name in lacking)
    return (
        f"torch {torch.__version__} lacks what {_PARTS[GUARD]} needs: {names}; expected {tested_range(GUARD)}"
        if lacking
        else ""
    )


def unsupported(error: Exception) -> Exception:
    """Return the error to raise for an import error of the simulator: one line for an untested torch."""
    version = str(getattr(sys.modules.get("torch"), "__version__", "0.0"))
    if not compared(version, SIM):
        return error
    return UsageError(f"expected {tested_range(SIM)} for {_PARTS[SIM]}, found {version}: {error}; install one of those")


def remarks(part: Need) -> list[str]:
    """Return remarks on this torch for *part*: untested, installed twice, or with missing features."""
    torch: Any = sys.modules["torch"]
    lines = []
    side = compared(torch.__version__, part)
    if side:
        which, limit = ("newer", "newest") if side > 0 else ("older", "oldest")
        lines.append(
            f"torch {torch.__version__} is {which} than the {limit} that {_TESTED_PART[part]} tested on "
            f"({TESTED[part][-1 if side > 0 else 0]})"
        )
    if part is GUARD and is_free_threaded():
        lines.append(f"{_PARTS[GUARD]} was not tested on a free-threaded Python")
    others = other_torches()
    if others:
        lines.append(f"several torches are on the path: {torch.__file__} is used, not {', '.join(others)}; remove one")
    if left_out:
        features = ", ".join(sorted(set(left_out.values())))
        lines.append(f"torch {torch.__version__} lacks {', '.join(sorted(left_out))}; left out: {features}")
    return lines


def other_torches() -> list[str]:
    """Folders named `torch` on the path that hold another torch than the one that is imported first."""
    folders: dict[str, str] = {}
    for entry in sys.path:
        folder = os.path.join(entry or ".", "torch")
        if os.path.exists(os.path.join(folder, "version.py")):
            folders.setdefault(os.path.realpath(folder), folder)
    return list(folders.values())[1:]


def _minor(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _unmet_simulation(torch: Any) -> list[str]:
    """Return the features that the simulator cannot do without and this torch lacks; looked up once for a torch and
    Python.
    """
    here = Path(__file__).parent
    stamp = [str(max(file.stat().st_mtime_ns for file in here.glob("*.py"))), str(os.path.getmtime(torch.__file__))]
    key = "|".join([torch.__version__, sys.version, str(here), *stamp])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "distsim" / "torch_compat.json"
    known: dict[str, list[str]] = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = dict(read_json(cache))
        if isinstance(features := known.get(key), list):
            return [str(feature) for feature in features]
    lacking = sorted({name.feature for name in unmet(SIM)})
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        new = cache.with_name(f"{cache.name}.{os.getpid()}")
        new.write_text(json.dumps({key: lacking, **dict(list(known.items())[:7])}), encoding="utf-8")
        new.replace(cache)
    return lacking
