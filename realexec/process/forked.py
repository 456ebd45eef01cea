"""A process group in a forked child of a rank: its first call is noted, for the monitor to report."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from distsim.debug.evidence.forked_calls import write_note
from distsim.debug.records.arguments import FIELDS
from distsim.debug.records.frames import program_frames, steps

__all__ = ["InheritedGroup"]

OPERATIONS = {method: op for op, fields in FIELDS.items() for method in fields.methods}
"""Methods of a process group, and what torch.distributed calls them."""


class InheritedGroup:
    """Stands for the C++ group *inner* in a child of the rank that writes *ring*."""

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
        """Leave a note of a call of the method *name*."""
        with contextlib.suppress(Exception):  # a full disk, say: the program goes on as it would
            stack = program_frames(steps(sys._getframe(2)))
            write_note(self._ring.parent, self._ring.name, os.getpid(), OPERATIONS[name], stack)
