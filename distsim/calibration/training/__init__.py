"""Published training steps against simulated ones: `distsim validate --training`.

`rows.csv` has a step a line with the program and the flags that repeat it; `steps.py` reads it, simulates a row through
`distsim run`, holds the errors to the bounds and says where unseen steps lie.
"""

from __future__ import annotations

__all__ = ["steps"]
