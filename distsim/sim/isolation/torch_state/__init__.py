"""Keeps the process-wide state of torch once per simulated rank.

torch_compat lists the attributes; `torch_state.py` swaps those that a rank changed; `words.py` detects writes;
`distributed.py` shares state that is equal for every rank.
"""

from __future__ import annotations

__all__ = [
    "distributed",
    "operators",
    "torch_state",
    "words",
]
