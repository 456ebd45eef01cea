"""Where in the user's program a call was made."""

from __future__ import annotations

import sys
from types import FrameType

from distsim.debug.records import Site
from distsim.sim.modules import is_user_file

__all__ = ["handle_is_the_users", "user_stack"]

# By name of the file: code objects are equal whatever file they come from.
_users: dict[str, bool] = {}
_sites: dict[tuple[str, int, str], Site] = {}


def user_stack(frame: FrameType | None = None, limit: int = 16) -> tuple[Site, ...]:
    """The user's frames of this thread, innermost first; of *frame* where one is given."""
    if frame is None:
        frame = sys._getframe(1)
    found: list[Site] = []
    walk: FrameType | None = frame
    while walk is not None and len(found) < limit:
        code = walk.f_code
        file = code.co_filename
        mine = _users.get(file)
        if mine is None:
            mine = _users[file] = is_user_file(file)
        if mine:
            line = walk.f_lineno or code.co_firstlineno
            site = _sites.get((file, line, code.co_name))
            if site is None:
                site = _sites[file, line, code.co_name] = Site(file, line, code.co_name)
            found.append(site)
        walk = walk.f_back
    return tuple(found)


def handle_is_the_users(frame: FrameType) -> bool:
    """Whether the user's own code called torch.distributed: what it calls for torch's (DDP's join, ZeRO, functional
    collectives) keeps or drops handles as torch sees fit."""
    walk: FrameType | None = frame
    while walk is not None and not is_user_file(walk.f_code.co_filename):
        file = walk.f_code.co_filename
        if "/torch/" in file and not file.endswith(("/distributed_c10d.py", "/c10d_logger.py")):
            return False
        walk = walk.f_back
    return True
