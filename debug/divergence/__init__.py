"""Finds where a rank left the common order of calls: skipped, added or swapped one.

`find.py` is asked; `divergence.py` is its answer and lays calls beside each other; `history.py`, `not_arrived.py` and
`source_order.py` are its witnesses.
"""

from __future__ import annotations

__all__ = ["divergence", "find", "history", "not_arrived", "source_order"]
