"""What the model says of tables that it was not fitted to, how wrong that is, and so how sure an answer is.

`left_out.py` predicts, `split.py` tells errors apart by fabric, nodes and size, `report.py` holds them to bounds, and
`uncertainty.py` answers with an interval.
"""

from __future__ import annotations

from distsim.calibration.predictions.uncertainty import Interval, interval

__all__ = ["Interval", "interval"]
