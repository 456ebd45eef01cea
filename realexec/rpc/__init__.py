"""torch.distributed.rpc on TensorPipe under guard: `hooks.py` is where it enters torch, `log.py` what a worker notes of
its calls and of those it serves, `udf.py` how the callee knows which call it serves.
"""

from __future__ import annotations

__all__ = ["hooks", "log", "udf"]
