"""Measured tables, the constants fitted to them, and the comparison of both.

`nccl.toml` has every fitted constant with its source; `compare.py` is `distsim validate`, `fit.py` `distsim calibrate`,
`predictions.py` what the model says of machines that no fit has seen; `live.py` measures gloo, `ops.py` a GPU.
"""

from __future__ import annotations

from distsim.calibration.constants import Constants, nccl_constants

__all__ = ["Constants", "nccl_constants"]
