"""The debug layer: flight records, checks and diagnosis of hangs, for real jobs and simulated ones.

`install()` puts every process group of this process under guard, `remove()` takes it off again; a job
without changes in its code runs as `python -m distsim.debug train.py`.
"""

from __future__ import annotations

import importlib
from typing import Any

from distsim.errors import CollectiveMismatch

__all__ = ["CollectiveMismatch", "install", "remove"]


def install(level: str | None = None, on_hang: str | None = None, dir: Any = None, **settings: Any) -> None:
    """Put every process group of this process under guard, those that exist and those made later.

    *level*: `record`, `check` (default), `strict` or `off`. *on_hang*: `report` (default), `abort` or
    `wait`. *dir*: where the rings go. Further settings: `hang_after_s`, `report`, `nan`, `checksum`.
    What is not given comes from the environment (`DISTSIM_LEVEL`, ...). Call it in every rank, best before
    `init_process_group`: what is called on a group object from before goes on, unrecorded.
    """
    importlib.import_module("distsim.realexec.install").install(level, on_hang, dir, **settings)


def remove() -> None:
    """Take the guard off again."""
    importlib.import_module("distsim.realexec.install").remove()
