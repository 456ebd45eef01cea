"""One program many times: under many schedules (`explore.py`), many settings (`sweep.py`), until it fits (`fits.py`).

`points.py` runs the points, and finds the flags of a script that change its layout.
"""

from __future__ import annotations

__all__ = ["explore", "fits", "points", "sweep", "tune"]
