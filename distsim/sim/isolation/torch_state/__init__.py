"""torch's state for the whole process, kept once per simulated rank.

`torch_places.py` lists the places; `torch_state.py` swaps what a rank changed; `class_guards.py` sees it in classes.
"""

from __future__ import annotations

__all__ = ["class_guards", "known", "operators", "torch_flags", "torch_places", "torch_state"]
