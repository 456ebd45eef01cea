"""The scenario file: its schema, how it is read, found and begun.

`schema.py` is the file's shape, `json_schema.py` what editors get of it; `load.py` reads one and tells every fault
at once.
"""

from __future__ import annotations

__all__ = ["cut_off", "fault_schema", "find", "functions", "json_schema", "load", "new", "schema"]
