"""Process-wide state of torch, kept once per simulated rank.

torch_compat lists the places; `torch_state.py` swaps what a rank changed; `words.py` detects writes;
`distributed.py` shares what is equal for every rank.
"""

from __future__ import annotations

__all__ = [
    "distributed",
    "operators",
    "torch_state",
    "words",
]
