"""What makes threads of one interpreter look like processes: each state that Python and torch keep once.

`process.py` swaps it in and out; every other module is one such state.
"""

from __future__ import annotations

__all__ = [
    "clock",
    "environ",
    "global_flags",
    "io_barrier",
    "modules",
    "output",
    "process",
    "randomness",
    "torch_state",
    "wraps",
]
