"""What an operator does to tensors of a simulated GPU: the looks of its results, their values where they are known.

Start with `plan.py`; `values.py` says which values are known, `transfers.py` moves them to the host and back.
"""

from __future__ import annotations

__all__ = [
    "checks",
    "flex",
    "handler",
    "host_cells",
    "kinds",
    "on_host",
    "pinned",
    "plan",
    "random_fills",
    "special",
    "torch_words",
    "transfers",
    "values",
]
