"""What `calibrate` and `validate` print of whole folders: logs of nccl-tests, published training steps.

`logs.py` is `distsim calibrate --from LOGS`, `training.py` is `distsim validate --training`.
"""

from __future__ import annotations

from distsim.cli.calibration.logs import run_logs
from distsim.cli.calibration.training import run_training

__all__ = ["run_logs", "run_training"]
