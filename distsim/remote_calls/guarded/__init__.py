"""torch.distributed.rpc on TensorPipe under the guard.

`hooks.py` patches torch, and `log.py` records the calls that a worker makes and serves.
"""

from __future__ import annotations

__all__ = ["hooks", "log"]
