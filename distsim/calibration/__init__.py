"""Measurements beside the model: `distsim validate` and `distsim calibrate`. Nothing else in distsim needs this shelf.

`validate.py` is the first command: `predictions.py` predicts the measured tables (`compare.py`), those of a machine
with constants that saw nothing of it. `calibrate.py` is the second: `logs` makes a cluster file of nccl-tests' output,
`live.py` measures gloo, and `ops.py` measures a GPU. The constants are in `distsim.collectives.constants`, and
tools/fitting fits them.
"""

from __future__ import annotations

__all__ = ["calibrate", "compare", "live", "logs", "ops", "predictions", "validate"]
