"""One scenario many times: under many schedules (`explore.py`), or many settings (`sweep.py`).

Both only call `run_scenario`.
"""

from __future__ import annotations

__all__ = ["explore", "sweep"]
