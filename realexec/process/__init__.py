"""The guard's parts in one process: its ring, hooks, heartbeat, and the ranks that it starts itself.

`session.py` connects them.
"""

from __future__ import annotations

__all__ = ["children", "ddp", "heartbeat", "hooks", "introduce_monitors", "session", "silent", "worlds"]
