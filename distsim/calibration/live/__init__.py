"""Measuring the machine at hand: gloo's collectives here, as a cluster file.

`measure.py` runs and fits; `worker.py` is one rank of it.
"""

from __future__ import annotations

__all__ = ["check", "measure", "worker"]
