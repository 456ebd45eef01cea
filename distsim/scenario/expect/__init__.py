"""Compares a result with the expectations of a scenario: differences, figures, baselines, formats for CI.

`expect.py` compares and makes the result of a run, `result.py` holds it and writes it for CI.
"""

from __future__ import annotations

__all__ = ["expect", "result"]
