"""Runs one program in two layouts and compares what they compute.

`record.py` records the tensors of a simulated run; `compare.py` finds how those of several ranks form one of the other
layout, and the first that differs; `layouts.py` runs the program as often as needed (each time in a process of its own,
`child.py`); `report.py` prints the result of `command.py`.
"""

from __future__ import annotations

__all__ = ["child", "command", "compare", "layouts", "record", "report"]
