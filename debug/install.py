"""The door to the guard: what a user calls. The code behind it is `distsim.realexec`, loaded on first use."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["install", "remove"]


def install(level: str | None = None, on_hang: str | None = None, dir: Any = None, **settings: Any) -> None:
    """Put every process group of this process under guard, those that exist and those made later.

    *level*: `record`, `check` (default), `strict` or `off`. *on_hang*: `report` (default), `abort` or
    `wait`. *dir*: where the rings go. Further settings: `hang_after_s`, `report`, `nan`, `checksum`.
    What is not given comes from the environment (`DISTSIM_LEVEL`, ...). Call it in every rank.
    """
    importlib.import_module("distsim.realexec.install").install(level, on_hang, dir, **settings)


def remove() -> None:
    """Take the guard off again."""
    importlib.import_module("distsim.realexec.install").remove()
