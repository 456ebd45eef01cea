"""Find where a rank left the common order of calls: it skipped, added or swapped one.

`find.py` is the entry point; `divergence.py` has its result, compares calls and reads the past of ranks;
`source_order.py` reads the program.
"""

from __future__ import annotations

__all__ = ["divergence", "find", "source_order"]
