"""Compares a result with the expectations of a scenario: differences, figures, baselines, formats for CI.

`expect.py` compares a run and returns its result; `result.py` defines the result and writes it for CI.
"""

from __future__ import annotations

__all__ = ["expect", "result"]
