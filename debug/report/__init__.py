"""What people see of a diagnosis: the report, the live table, where every rank was.

`render.py` makes the report, of `lines.py`; `alike.py` is what is told once; `console.py` is the one way to a terminal.
"""

from __future__ import annotations

__all__ = ["alike", "console", "events", "lines", "live", "news", "rank_states", "render", "silent", "stack_tree"]
