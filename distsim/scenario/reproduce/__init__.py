"""From flight records of a hung run to the smallest scenario that hangs alike.

`reproduce.py` is the door; `write_program.py` writes the program, `loops.py` finds its loops.
"""

from __future__ import annotations

__all__ = ["loops", "reproduce", "write_program"]
