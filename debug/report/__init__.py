"""What people see of a diagnosis: the report, the live table, where every rank was.

`render.py` makes the report, of `lines.py`; `console.py` is the one way to a terminal.
"""

from __future__ import annotations

__all__ = ["console", "lines", "live", "news", "render", "stack_tree", "whereabouts"]
