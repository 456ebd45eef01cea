"""Measured tables, the constants that are fitted to them, and the comparison of both.

`nccl.toml` holds every fitted constant with its source. `compare.py` implements `distsim validate`, and `fit.py`
implements `distsim calibrate`. `predictions.py` checks the model on machines that were left out of the fit.
`live.py` measures gloo, and `ops.py` measures a GPU.
"""

from __future__ import annotations

from distsim.calibration.constants import Constants, nccl_constants

__all__ = ["Constants", "nccl_constants"]
