"""torch.distributed.rpc on TensorPipe under guard.

`hooks.py` is where it enters torch, `log.py` what a worker records of the calls that it makes and serves.
"""

from __future__ import annotations

__all__ = ["hooks", "log"]
