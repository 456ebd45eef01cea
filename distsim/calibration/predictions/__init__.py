"""What the model says of tables that it was not fitted to, how wrong that is, and so how sure an answer is.

`left_out.py` predicts, `split.py` tells errors apart by fabric, nodes and size, `report.py` holds them to bounds, and
`uncertainty.py` makes the table that `collectives/uncertainty.py` answers with.
"""

from __future__ import annotations

from distsim.collectives.uncertainty import Interval, interval

__all__ = ["Interval", "interval"]
