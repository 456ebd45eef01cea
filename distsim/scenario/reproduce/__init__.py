"""From flight records of a hung run to the smallest scenario that hangs alike.

`reproduce.py` is the door; `calls.py` is a run as its calls, `write_program.py` writes them as a program and
`loops.py` finds its loops.
"""

from __future__ import annotations

__all__ = ["calls", "loops", "reproduce", "write_program"]
