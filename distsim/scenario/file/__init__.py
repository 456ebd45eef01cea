"""The scenario file: its schema, and how files are read, found and created.

`schema.py` is the schema, and its form for editors; `load.py` finds and reads a file and reports all of its faults at
once; `fault_words.py` reads a fault of a command line.
"""

from __future__ import annotations

__all__ = ["fault_words", "load", "new", "schema"]
