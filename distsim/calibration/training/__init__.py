"""Published training steps against simulated ones: `distsim validate --training`.

`rows.csv` has a step a line with the program and the flags that repeat it; `rows.py` reads it, `runs.py` simulates one
row through `distsim run`, `errors.py` holds what came to the bounds, `intervals.py` where unseen steps lie.
"""

from __future__ import annotations

__all__ = ["errors", "intervals", "rows", "runs"]
