"""What the guard is in one process: its ring, hooks, heartbeat, and the ranks it starts itself.

`session.py` holds it all together.
"""

from __future__ import annotations

__all__ = ["children", "ddp", "heartbeat", "hooks", "introduce_monitors", "session", "silent", "worlds"]
