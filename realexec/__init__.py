"""Real runs: torch elastic with every rank guarded, and the guard inside each rank.

`launch.py` is `distsim run --on gloo`; `install.py` installs the guard in a process; `guard/` records calls.
"""

from __future__ import annotations

__all__ = ["callback", "guard", "install", "launch", "process", "replicas", "strict"]
