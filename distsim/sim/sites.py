"""Where in the user's program a call was made."""

from __future__ import annotations

import sys
from types import FrameType

from distsim.debug.frames import program_frames, steps
from distsim.debug.records import Site

__all__ = ["user_stack"]


def user_stack(frame: FrameType | None = None) -> tuple[Site, ...]:
    """The user's frames of this thread, innermost first; of *frame* where one is given."""
    return program_frames(steps(sys._getframe(1) if frame is None else frame))
