"""The scenario file: its schema, and how files are read, found and created.

`schema.py` is the schema, `json_schema.py` its form for editors; `load.py` reads a file and reports all of its faults
at once.
"""

from __future__ import annotations

__all__ = ["cut_off", "fault_schema", "find", "functions", "json_schema", "load", "new", "schema"]
