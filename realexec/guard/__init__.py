"""A process group under guard: torch's own group does the work, and every call is recorded first.

`group.py` replaces torch's group, `hooked.py` watches it by hooks; `recorder.py` is the hot path into the ring.
"""

from __future__ import annotations

__all__ = ["api_wrappers", "fast_path", "group", "handle", "hooked", "recorder", "tensor_checks"]
