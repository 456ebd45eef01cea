"""Compares a result with the expectations of a scenario: differences, figures, baselines, formats for CI.

`expect.py` compares; `result.py` holds the result, which `run_result.py` makes from a simulated or real run.
"""

from __future__ import annotations

__all__ = ["baseline", "entries", "expect", "figures", "github", "junit", "replay", "result", "run_result"]
