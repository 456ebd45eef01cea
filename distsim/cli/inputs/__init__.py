"""Input of commands besides their own flags: commands of other launchers.

`launchers.py` belongs to `distsim run`, and `shell.py`, which starts it, is `distsim shell`.
"""

from __future__ import annotations

__all__ = ["launchers", "shell"]
