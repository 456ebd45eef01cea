"""Input of commands besides their own flags: commands of other launchers, logs of nccl-tests, published steps.

`launchers.py` belongs to `distsim run`, and `shell.py`, which starts it, is `distsim shell`. `calibrate.py` and
`validate.py` are the commands of these names.
"""

from __future__ import annotations

__all__ = ["calibrate", "launchers", "shell", "validate"]
