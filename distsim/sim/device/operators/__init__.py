"""Results of operators on tensors of a simulated GPU: shapes and dtypes, and values if they are known.

Start with `plan.py`; `values.py` keeps known values, `transfers.py` moves them to the host and back, and
`reading.py` finds the lines that read them.
"""

from __future__ import annotations

__all__ = [
    "kinds",
    "plan",
    "reading",
    "special",
    "transfers",
    "values",
]
