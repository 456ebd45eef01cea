"""Texts that people and strangers write: quantities with units, bounded reading, annotations, names.

`units.py`, `ranks.py`, `strangers.py`, `github.py`, `exceptions.py`, `alike.py`, `writable.py`, `written.py`; no part
of distsim lies below these but its errors.
"""

from __future__ import annotations

__all__ = ["alike", "exceptions", "github", "ranks", "strangers", "units", "writable", "written"]
