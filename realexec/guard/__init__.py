"""Guarded process groups: torch's own group does the work, and every call is recorded first.

`group.py` replaces torch's group, and `recorder.py` writes each call into the ring (shared memory that outlives the
process).
"""

from __future__ import annotations

__all__ = ["api_wrappers", "fast_path", "group", "handle", "recorder", "tensor_checks"]
