"""Results of operators on tensors of a simulated GPU: shapes and dtypes, and values if they are known.

Start with `plan.py`; `values.py` keeps known values, `transfers.py` moves them to the host and back,
`uneven.py` draws choices and lengths that are unknown, and `reading.py` finds the lines that read values.
"""

from __future__ import annotations

__all__ = [
    "kinds",
    "plan",
    "reading",
    "special",
    "transfers",
    "uneven",
    "values",
]
