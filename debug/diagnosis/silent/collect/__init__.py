"""Records facts on a rank: hooks of torch, and the sketches of the tensors that they see.

`collector.py` is the record of one rank, `hooks.py` puts the hooks in place; both serve simulated and real ranks.
"""

from __future__ import annotations

__all__ = ["collector", "hooks", "sketch"]
