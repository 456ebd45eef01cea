"""Keeps the process-wide state of torch once per simulated rank.

torch_compat lists the places; `torch_state.py` swaps what a rank changed; `class_guard.py` finds
assigned classes; `distributed.py` shares what is equal for every rank.
"""

from __future__ import annotations

__all__ = [
    "class_guard",
    "distributed",
    "operators",
    "torch_state",
]
