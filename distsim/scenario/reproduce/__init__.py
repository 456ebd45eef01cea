"""Turns flight records of a hung run into the smallest scenario that hangs in the same way.

`reproduce.py` is the entry point; `calls.py` represents a run by its calls, `write_program.py` finds their loops and
writes them as a program.
"""

from __future__ import annotations

__all__ = ["calls", "reproduce", "write_program"]
