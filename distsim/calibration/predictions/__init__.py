"""What the model says of tables that it was not fitted to, and how wrong that is.

`left_out.py` predicts, `split.py` tells errors apart by fabric, nodes and size, `report.py` holds them to bounds, and
`widths.py` says how far the intervals of `distsim.collectives.uncertainty` have to reach.
"""

from __future__ import annotations

__all__ = ["left_out", "report", "split", "widths"]
