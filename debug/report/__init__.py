"""Output of a diagnosis: the report, the live table, and the locations of all ranks.

`render.py` makes the report; `console.py` is the only way to a terminal.
"""

from __future__ import annotations

__all__ = ["console", "live", "news", "otlp", "rank_states", "render", "shown", "silent", "stack_tree"]
