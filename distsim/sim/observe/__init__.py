"""Observations of a simulation: evidence for a diagnosis, profiles and totals.

`evidence.py` collects the state of every rank; `totals.py` makes the Outcome, `training.py` its part about GPUs, and
`silent.py` its part about silent faults, on simulated GPUs by the origins of tensors (`origins.py`, `provenance.py`).
"""

from __future__ import annotations

__all__ = [
    "evidence",
    "execution_trace",
    "gpu_tracks",
    "metrics",
    "origins",
    "profiler",
    "provenance",
    "silent",
    "totals",
    "training",
]
