"""What people see of a diagnosis: the report, the live table, where every rank was.

`render.py` makes the report, `console.py` is the one way to a terminal.
"""

from __future__ import annotations

__all__ = ["console", "events", "live", "news", "rank_states", "render", "silent", "stack_tree"]
