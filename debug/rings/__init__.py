"""Flight records in memory that outlives its process: their layout, who writes and who reads them.

`layout.py` is the file format, `writer.py` and `reader.py` its two ends; `files.py` is a job's folder, with its
processes and their ranks; `callsite.py` finds the user's line of a call.
"""

from __future__ import annotations

__all__ = ["callsite", "files", "layout", "reader", "writer"]
