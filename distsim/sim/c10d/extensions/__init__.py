"""Process groups beyond collectives and messages.

`symmetric_memory.py` and `windows.py` have memory and signals that GPUs share; `reconfigure.py` has groups whose
members change while the job runs.
"""

from __future__ import annotations

__all__ = ["reconfigure", "symmetric_memory", "windows"]
