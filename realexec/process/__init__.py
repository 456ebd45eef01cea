"""What the guard is in one process: its ring, hooks, heartbeat, and the ranks it starts itself.

`session.py` holds it all together.
"""

from __future__ import annotations

__all__ = [
    "ddp",
    "dropped",
    "forked",
    "heartbeat",
    "hooks",
    "introduce_monitors",
    "session",
    "silent",
    "spawn",
    "worlds",
]
