"""Runs one program in two layouts and compares what they compute.

`record.py` records the tensors of a simulated run, `relation.py` says how those of several ranks make one of the other
layout, `compare.py` finds the first that does not, `layouts.py` runs the program often enough to know (each time in a
process of its own, `child.py`), `report.py` says it.
"""

from __future__ import annotations

__all__ = ["child", "compare", "layouts", "record", "relation", "report"]
