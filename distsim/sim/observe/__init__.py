"""What is seen of a simulation: evidence for a diagnosis, profiles, totals, the user's lines.

`evidence.py` is where every rank stands; `totals.py` becomes the Outcome, `training.py` what it says of GPUs.
"""

from __future__ import annotations

__all__ = [
    "confidence",
    "critical_path",
    "evidence",
    "gpu_tracks",
    "lookahead",
    "metrics",
    "profile",
    "profiler",
    "reading",
    "silent",
    "totals",
    "training",
    "user_stack",
]
