"""Runs a scenario for real: guarded gloo processes in which faults are injected.

`real.py` runs one; `namespaces.py` makes hosts whose network can be cut.
"""

from __future__ import annotations

__all__ = ["inject", "namespaces", "real"]
