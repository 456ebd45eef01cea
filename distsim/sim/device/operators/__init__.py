"""What an operator does to tensors of a simulated GPU: the looks of its results, their values where they are known.

Start with `plan.py`; `values.py` says which values are known, `transfers.py` moves them to the host and back.
"""

from __future__ import annotations

__all__ = [
    "kinds",
    "plan",
    "special",
    "transfers",
    "values",
]
