"""torch.distributed.rpc on TensorPipe under guard: `hooks.py` is where it enters torch, `log.py` what a worker notes of
its calls and of those it serves, `derived.py` who waits for them through other futures, `fast_path.py` how what was
noted before is noted again, `udf.py` how the callee knows which call it serves.
"""

from __future__ import annotations

__all__ = ["derived", "fast_path", "hooks", "log", "udf"]
