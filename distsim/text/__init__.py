"""Texts that people and strangers write: quantities with units, bounded reading, annotations, names.

`units.py`, `ranks.py`, `strangers.py`, `github.py`, `exceptions.py`, `fold_tracebacks.py`,
`output_files.py`; no part of distsim lies below these but its errors.
"""

from __future__ import annotations

__all__ = ["exceptions", "fold_tracebacks", "github", "output_files", "ranks", "strangers", "units"]
