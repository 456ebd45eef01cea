"""Flight records, checks and diagnosis of hangs, for real and simulated jobs.

`install()` watches every process group of this process, and `remove()` stops watching. To watch a job without a
change of its code, run `python -m distsim.debug train.py`.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Literal

from distsim.errors import CollectiveMismatch

__all__ = ["CollectiveMismatch", "install", "remove"]

_TORCH_NAMES = frozenset({"start_debug_server", "stop_debug_server"})
"""Public names of torch.distributed.debug, whose place this package takes in `import distsim as dist`."""


def __getattr__(name: str) -> Any:
    if name in _TORCH_NAMES:
        return getattr(importlib.import_module("torch.distributed.debug"), name)
    raise AttributeError(f"module 'distsim.debug' has no attribute {name!r}")


def install(
    level: Literal["off", "record", "check", "strict"] | None = None,
    on_hang: Literal["report", "abort", "wait"] | None = None,
    dir: str | os.PathLike[str] | None = None,
    *,
    hang_after_s: float | None = None,
    report: str | None = None,
    nan: bool | None = None,
    checksum: bool | None = None,
    silent: Literal["off", "watch", "strict"] | None = None,
) -> None:
    """Watch every process group of this process, both existing groups and later ones.

    Call it in every rank, before `init_process_group` if possible. Calls on a group object that the program obtained
    earlier are not recorded. An argument that is None is read from its environment variable (`DISTSIM_LEVEL`,
    `DISTSIM_ON_HANG`, ...; docs/environment.md lists all of them with their defaults).

    Args:
        level: What happens at each call. `off` does nothing, `record` keeps flight records, `check` (default) also
            compares the calls of all ranks in a monitor process, `strict` compares them before any byte is sent and
            raises at every rank.
        on_hang: What happens after the report of a hang. `report` (default) leaves the job alone, `abort` ends it,
            `wait` keeps it as it is for a debugger.
        dir: Folder for the flight records. The default is a folder in shared memory.
        hang_after_s: Seconds after which a rank that others wait for counts as missing (default 60).
        report: File for the JSON report, or a folder for the report as JSON and text.
        nan: Whether to look for NaN in the tensors of every call.
        checksum: Whether to look for buffers that are written while a call uses them.
        silent: Whether to look for silent wrong results, and whether an error among them counts (docs/silent.md).

    Raises:
        UsageError: An argument or its environment variable has a value that is not allowed.
    """
    importlib.import_module("distsim.realexec.install").install(
        level,
        on_hang,
        dir,
        hang_after_s=hang_after_s,
        report=report,
        nan=nan,
        checksum=checksum,
        silent=silent,
    )


def remove() -> None:
    """Stop watching. Existing groups continue to work and are no longer recorded."""
    importlib.import_module("distsim.realexec.install").remove()
