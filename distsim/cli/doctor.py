"""`distsim doctor`: what this machine, Python and torch can do, in a form to paste into an issue."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from distsim import __version__
from distsim.errors import DistsimError, UsageError

DESCRIPTION = """\
Print versions, what is supported, what is refused and why, and the rights that diagnoses need.
Paste it into an issue.
"""
EXTRAS = ("py-spy", "mpi4py", "plotly", "pytest")
"""Optional distributions that enable features of distsim."""
PTRACE_SCOPES = {"0": "any process", "1": "children only", "2": "root only", "3": "none"}
"""Meaning of the values of /proc/sys/kernel/yama/ptrace_scope: which processes another process may inspect."""


def add_parser(subparsers: Any) -> None:
    """Add `doctor`."""
    parser = subparsers.add_parser("doctor", description=DESCRIPTION)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the report. Always return exit code 0."""
    for subject, text in lines():
        print(f"{subject:<20}{text}", flush=True)
    return 0


def lines() -> Iterator[tuple[str, str]]:
    """Yield the subject and the text of each line."""
    yield "distsim", f"{__version__} ({Path(__file__).parents[1]})"
    yield "python", f"{sys.version.split()[0]} {platform.python_implementation()} ({sys.executable})"
    libc = " ".join(platform.libc_ver())
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}, {libc}, {os.cpu_count()} cores"
    torch = _or_error(_torch)
    yield "torch", torch
    yield "beside it", ", ".join(f"{name} {_version(name)}" for name in EXTRAS)
    for part, describe in (
        ("real jobs", _real_jobs),
        ("simulations", _simulations),
        ("simulated GPUs", _simulated_gpus),
        ("left out", _left_out),
    ):
        text = _or_error(describe)
        yield part, f"{text.partition(':')[0]}, as torch above" if text == torch else text
    yield from (("tested", line) for line in _tested())
    yield "ptrace", _or_error(_ptrace)
    yield "/dev/shm", _or_error(_shared_memory)


def _or_error(describe: Callable[[], str]) -> str:
    """Return a description, or its error: a report about broken things must not break."""
    try:
        return describe()
    except DistsimError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _tested() -> Iterator[str]:
    """Yield a line for each part: the releases of torch and Python that tests ran on, and which tests."""
    from distsim.torch_compat.releases import VERSIONS

    for part, torch, python, tests in VERSIONS:
        releases = torch if isinstance(torch, str) else ", ".join(torch)
        yield f"{part}: torch {releases}; Python {python}; by {tests}".replace("`", "")


def _imported_torch() -> Any:
    from distsim.torch_compat.names import SIM
    from distsim.torch_compat.releases import imported_torch

    return imported_torch(SIM)


def _torch() -> str:
    from distsim.torch_compat.releases import other_torches

    torch = _imported_torch()
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    count = torch.cuda.device_count() if torch.version.cuda else 0
    others = other_torches()
    return (
        f"{torch.__version__}, {build}, {count} GPUs, backends {' '.join(_backends()) or 'none'} ({torch.__file__})"
        + (f"; hides another: {', '.join(others)}" if others else "")
    )


def _backends() -> list[str]:
    dist = importlib.import_module("torch.distributed")
    return [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]


def supported(part: Any) -> str:
    from distsim.torch_compat.releases import TESTED, compared, is_tested, tested_range

    version = _imported_torch().__version__
    if is_tested(version, part):
        return f"supported; this torch is one of the tested releases ({', '.join(TESTED[part])})"
    side = compared(version, part)
    if not side:
        tested = ", ".join(TESTED[part])
        return f"not tested: this torch lies between the tested releases ({tested}); everything needed is available"
    age = "newer" if side > 0 else "older"
    return (
        f"not tested: this torch is {age} than the tested releases ({tested_range(part)}); everything needed is "
        "available"
    )


def _real_jobs() -> str:
    from distsim.torch_compat.names import GUARD
    from distsim.torch_compat.releases import guard_refusal, is_free_threaded

    refusal = guard_refusal()
    if refusal:
        raise UsageError(refusal)
    if not _backends():
        raise UsageError("this torch was built without gloo, NCCL and MPI; install torch with pip")
    if is_free_threaded():
        return "not tested: a free-threaded Python; everything needed is available"
    return supported(GUARD)


def _simulations() -> str:
    from distsim.torch_compat.names import SIM

    _imported_torch()
    importlib.import_module("distsim.sim")
    importlib.import_module("distsim.sim.patches").all_patches()
    return supported(SIM)


def _simulated_gpus() -> str:
    if _imported_torch().cuda.is_available():
        return "not tried beside a real GPU; a simulation never uses it"
    importlib.import_module("distsim.sim")
    hooks = importlib.import_module("distsim.sim.device.hooks")
    with hooks.accepted():
        hooks.tested()
    return "supported"


def _left_out() -> str:
    from distsim.torch_compat.names import all_names, left_out

    _imported_torch()
    for name in all_names().values():
        name.get()
    return ", ".join(f"{feature} ({path})" for path, feature in sorted(left_out.items())) or "nothing"


def _ptrace() -> str:
    """Return a line on whether the stacks of other processes can be read; opening a process's memory needs the same
    right.
    """
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="utf-8").strip()
    except OSError:
        scope = "0"
    with subprocess.Popen(
        [sys.executable, "-IS", "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        try:
            os.close(os.open(f"/proc/{child.pid}/mem", os.O_RDONLY))
            answer = "stacks of other processes can be read"
        except OSError as error:
            answer = f"stacks of other processes cannot be read ({error.strerror}); in a container add SYS_PTRACE"
    return f"{answer}; yama allows {PTRACE_SCOPES.get(scope, scope)}"


def _shared_memory() -> str:
    folder = "/dev/shm"
    if not os.path.isdir(folder):
        return "not available: flight records are written to the temporary folder"
    free_gib = shutil.disk_usage(folder).free / (1 << 30)
    return f"{'writable' if os.access(folder, os.W_OK) else 'not writable'}, {free_gib:.1f} GiB free"
