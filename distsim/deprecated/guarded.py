"""Dropped names under the guard: which rank a process gets without torch's rendezvous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from distsim.deprecated import in_torch
from distsim.deprecated.in_torch import OldMeeting

_ABSENT = object()


class DroppedHook:
    """Calls `begins(rank, world_size, where)` when a dropped function of torch gives this process its rank."""

    def __init__(self, begins: Callable[[int, int, str], None]) -> None:
        self._begins = begins
        self._undo: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Patch torch once."""
        if self._undo:
            return
        for holder, name, value in [*in_torch.torch_patches(), (in_torch, "begins", self._joins)]:
            before = vars(holder).get(name, _ABSENT) if hasattr(holder, "__dict__") else getattr(holder, name)
            self._undo.append((holder, name, before))
            setattr(holder, name, value)

    def remove(self) -> None:
        """Undo the patches."""
        while self._undo:
            holder, name, before = self._undo.pop()
            if before is _ABSENT:
                delattr(holder, name)
            else:
                setattr(holder, name, before)

    def _joins(self, meeting: OldMeeting, rank: int) -> None:
        if not dist.is_initialized():
            self._begins(rank, meeting.world_size, meeting.name)
