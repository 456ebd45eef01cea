"""Makes threads of one interpreter look like processes, by swapping the state that Python and torch keep only once.

`interpreter.py` swaps it, `process.py` is a simulated process; every other module has one kind of state.
"""

from __future__ import annotations

__all__ = [
    "clock",
    "environ",
    "for_ranks",
    "global_flags",
    "interpreter",
    "io_barrier",
    "modules",
    "output",
    "process",
    "torch_state",
    "wraps",
]
