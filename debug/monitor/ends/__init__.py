"""How ranks end that do not end themselves.

`abort.py` ends those of a host, where a hang is to end the job; `moving.py` says what
may end a job that still makes calls; `orphans.py` knows when their launcher is gone.
"""

from __future__ import annotations

__all__ = ["abort", "moving", "orphans"]
