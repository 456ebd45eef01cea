"""Where in the user's program a call was made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType

from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d

from distsim.debug.records import Site
from distsim.debug.records.arguments import SYNCHRONOUS_P2P
from distsim.debug.records.frames import Owner, owner, program_frames, steps, torchs_thread

__all__ = ["call_stack", "forget_stacks", "handle_is_the_users", "user_stack", "waits_itself"]

_BETWEEN = (
    "/distributed_c10d.py",
    "/c10d_logger.py",
    "/torch/_ops.py",
    "/torch/overrides.py",
    "/utils/_device.py",
    "/_comm_mode.py",
)
"""Files of torch between a user's call of torch.distributed and us; the last two under torch.set_default_device and
CommDebugMode."""
C10D = (vars(c10d), vars(c10d_logger))

_known: dict[tuple[int, ...], tuple[tuple[Site, ...], list[CodeType]]] = {}
"""By the identity of each frame's code and the place in it: its sites, and the code, so that it stays the same.
A program comes to few places from few others."""
_KNOWN_MAX = 4_096


def user_stack(frame: FrameType | None = None) -> tuple[Site, ...]:
    """The user's frames of this thread, innermost first; of *frame* where one is given."""
    return program_frames(steps(sys._getframe(1) if frame is None else frame))


def call_stack(frame: FrameType) -> tuple[Site, ...]:
    """Where the call of *frame* was made: the user's frames, or torch's in a thread of its own."""
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
        codes = [step.f_code for step in _outwards(frame)]
        known = _known[key] = (user_stack(frame) or torchs_thread(steps(frame)), codes)
    return known[0]


def _outwards(frame: FrameType) -> Iterator[FrameType]:
    walk: FrameType | None = frame
    while walk is not None:
        yield walk
        walk = walk.f_back


def forget_stacks() -> None:
    """A simulation is over: its code is kept no longer, and files may have other names in the next."""
    _known.clear()


def handle_is_the_users(frame: FrameType) -> bool:
    """Whether the user's own code called torch.distributed: what it calls for torch's (DDP's join, ZeRO, functional
    collectives) keeps or drops handles as torch sees fit."""
    walk: FrameType | None = frame
    while walk is not None and owner(walk.f_code.co_filename) is not Owner.USER:
        file = walk.f_code.co_filename
        if "/torch/" in file and not file.endswith(_BETWEEN):
            return False
        walk = walk.f_back
    return True


def waits_itself(frame: FrameType | None) -> bool:
    """Whether the function of torch.distributed that a program called waits for its message: `send` calls `isend`,
    and `send_object_list` calls `send`."""
    while frame is not None and any(frame.f_globals is one for one in C10D):
        if frame.f_code.co_name in SYNCHRONOUS_P2P:
            return True
        frame = frame.f_back
    return False
