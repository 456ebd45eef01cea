"""What is seen of a simulation: evidence for a diagnosis, profiles, totals, the user's lines.

`evidence.py` is where every rank stands; `totals.py` becomes the Outcome, `training.py` what it says of GPUs,
`silent.py` what it says of wrong results.
"""

from __future__ import annotations

__all__ = [
    "critical_path",
    "evidence",
    "metrics",
    "profiler",
    "reading",
    "silent",
    "totals",
    "training",
]
