"""The scenario file: its schema, how it is read, found and begun.

`schema.py` is the file's shape; `load.py` reads one and tells every fault at once.
"""

from __future__ import annotations

__all__ = ["cut_off", "fault_schema", "find", "functions", "load", "new", "schema"]
