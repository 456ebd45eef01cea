"""What commands read beside their own flags: commands of other launchers, logs of nccl-tests, published steps.

`launchers.py` is for `distsim run`, `logs.py` is `distsim calibrate --from LOGS`, `training.py` is
`distsim validate --training`.
"""

from __future__ import annotations

__all__ = ["launchers", "logs", "training"]
