"""Texts that people and strangers write: quantities with units, bounded reading, annotations.

`units.py`, `strangers.py`, `github.py`; no part of distsim lies below these but its errors.
"""

from __future__ import annotations

__all__ = ["github", "strangers", "units"]
