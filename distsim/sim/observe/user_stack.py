"""Where in the user's program a call was made."""

from __future__ import annotations

import sys
from types import FrameType

from distsim.debug.records import Site
from distsim.debug.records.frames import Owner, owner, program_frames, steps, torchs_thread

__all__ = ["call_stack", "handle_is_the_users", "user_stack"]


def user_stack(frame: FrameType | None = None) -> tuple[Site, ...]:
    """The user's frames of this thread, innermost first; of *frame* where one is given."""
    return program_frames(steps(sys._getframe(1) if frame is None else frame))


def call_stack(frame: FrameType) -> tuple[Site, ...]:
    """Where the call of *frame* was made: the user's frames, or torch's in a thread of its own."""
    return user_stack(frame) or torchs_thread(steps(frame))


def handle_is_the_users(frame: FrameType) -> bool:
    """Whether the user's own code called torch.distributed: what it calls for torch's (DDP's join, ZeRO, functional
    collectives) keeps or drops handles as torch sees fit."""
    walk: FrameType | None = frame
    while walk is not None and owner(walk.f_code.co_filename) is not Owner.USER:
        file = walk.f_code.co_filename
        if "/torch/" in file and not file.endswith(("/distributed_c10d.py", "/c10d_logger.py")):
            return False
        walk = walk.f_back
    return True
