"""Input of commands besides their own flags: commands of other launchers, logs of nccl-tests, published steps.

`launchers.py` belongs to `distsim run`, and `shell.py`, which starts it, is `distsim shell`. `calibrate.py` and
`logs.py` are `distsim calibrate`; `validate.py` and `training.py` are `distsim validate`.
"""

from __future__ import annotations

__all__ = ["calibrate", "launchers", "logs", "shell", "training", "validate"]
