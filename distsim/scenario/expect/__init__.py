"""What a scenario expects against what came: differences, figures, baselines, CI's formats.

`expect.py` compares; `result.py` is what came, `run_result.py` makes it of a run, simulated or real.
"""

from __future__ import annotations

__all__ = ["baseline", "entries", "expect", "figures", "github", "junit", "replay", "result", "run_result"]
