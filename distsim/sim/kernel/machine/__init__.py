"""The machine that simulates: its cores, its clock, its heap.

Nothing here changes what a program sees; it is how a simulation gets along with an operating system, a C library and
other programs that know nothing of it.
"""

from __future__ import annotations

__all__ = ["heap", "one_core", "own_time"]
