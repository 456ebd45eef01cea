"""Input of commands besides their own flags: commands of other launchers, and flags that several commands share.

`pool.py` has the flags of where points run. `launchers.py` belongs to `distsim run`, and `shell.py`, which starts it,
is `distsim shell`.
"""

from __future__ import annotations

__all__ = ["launchers", "pool", "shell"]
