"""Measurements: `distsim validate`, `calibrate`, `health` and `trace`.

Nothing else in distsim needs this shelf. `validate.py`: `predictions.py` predicts the measured tables (`compare.py`),
those of a machine with constants that saw nothing of it. `calibrate.py`: `logs` makes a cluster file of nccl-tests'
output, `live.py` measures gloo, and `ops.py` measures a GPU. `health.py` compares nodes by logs, `expectation.py` all
of them with the model, and `traces` compares ranks by traces. The constants are in `distsim.collectives.constants`,
and tools/fitting fits them.
"""

from __future__ import annotations

__all__ = [
    "calibrate",
    "compare",
    "expectation",
    "health",
    "live",
    "logs",
    "ops",
    "predictions",
    "schema",
    "traces",
    "validate",
]
