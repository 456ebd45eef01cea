"""A watchdog process beside a simulation, so that every run ends with a report.

`shared_state.py` is the shared page; `process.py` reads it. Imports nothing heavy.
"""

from __future__ import annotations

__all__ = ["process", "shared_state"]
