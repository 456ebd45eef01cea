"""Finds where a rank left the common order of calls: it skipped, added or swapped one.

`find.py` is the entry point; `divergence.py` has its result and compares calls; `history.py`, `not_arrived.py` and
`source_order.py` supply evidence.
"""

from __future__ import annotations

__all__ = ["divergence", "find", "history", "not_arrived", "source_order"]
