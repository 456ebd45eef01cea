"""Parts of the guard in one process: ring, hooks, heartbeat, and the ranks that the process starts.

`session.py` connects them.
"""

from __future__ import annotations

__all__ = ["children", "ddp", "end_hooks", "hooks", "introduce_monitors", "sampling", "session", "silent", "worlds"]
