"""Where in the user's program a call was made."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from distsim.debug.records import Site
from distsim.sim.modules import is_user_file

__all__ = ["user_stack"]

_users: dict[CodeType, bool] = {}
_sites: dict[tuple[CodeType, int], Site] = {}


def user_stack(frame: FrameType | None = None, limit: int = 16) -> tuple[Site, ...]:
    """The user's frames of this thread, innermost first; of *frame* where one is given."""
    if frame is None:
        frame = sys._getframe(1)
    found: list[Site] = []
    walk: FrameType | None = frame
    while walk is not None and len(found) < limit:
        code = walk.f_code
        mine = _users.get(code)
        if mine is None:
            mine = _users[code] = is_user_file(code.co_filename)
        if mine:
            line = walk.f_lineno or code.co_firstlineno
            site = _sites.get((code, line))
            if site is None:
                site = _sites[code, line] = Site(code.co_filename, line, code.co_name)
            found.append(site)
        walk = walk.f_back
    return tuple(found)
