"""A scenario for real: gloo under guard in processes of their own, with faults that strike there.

`real.py` runs one; `namespaces.py` makes hosts whose network can be cut.
"""

from __future__ import annotations

__all__ = ["inject", "namespaces", "real"]
