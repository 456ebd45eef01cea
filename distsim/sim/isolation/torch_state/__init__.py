"""torch's state for the whole process, kept once per simulated rank.

The places are listed in torch_compat; `torch_state.py` swaps what a rank changed; `class_guards.py` sees it in classes,
`words.py` that nobody has written anywhere; `sharding_rules.py`, `empty_shards.py` and `step_hooks.py` share what is
the same for every rank.
"""

from __future__ import annotations

__all__ = [
    "class_guards",
    "empty_shards",
    "meshes",
    "operators",
    "place",
    "sharding_rules",
    "step_hooks",
    "torch_flags",
    "torch_imports",
    "torch_state",
    "words",
]
