"""torch's state for the whole process, kept once per simulated rank.

The places are listed in torch_compat; `torch_state.py` swaps what a rank changed, `words.py` sees that nobody has
written anywhere; `distributed.py` shares what is the same for every rank.
"""

from __future__ import annotations

__all__ = [
    "distributed",
    "operators",
    "torch_state",
    "words",
]
