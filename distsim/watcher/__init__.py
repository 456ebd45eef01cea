"""A process that watches another one simulate, so that every run ends with a report.

`beacon.py` is the shared page; `overseer.py` reads it. Imports nothing heavy.
"""

from __future__ import annotations

__all__ = ["beacon", "fate", "overseer"]
