"""Recording of training facts on each rank: torch hooks, and sketches of the tensors that they see.

`collector.py` holds the facts of one rank, and `hooks.py` installs the hooks. Simulated and real ranks use both.
"""

from __future__ import annotations

__all__ = ["collector", "hooks", "sketch"]
