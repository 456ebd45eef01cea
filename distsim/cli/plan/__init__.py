"""Commands that answer questions before a cluster is booked: does it fit, which layout, what does it cost.

Begin with `fits`, then `sweep` and `tune`.
"""

from __future__ import annotations

__all__ = ["fits", "sweep", "tune"]
