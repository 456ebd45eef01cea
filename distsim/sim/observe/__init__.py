"""What is seen of a simulation: evidence for a diagnosis, profiles, totals, the user's lines.

`evidence.py` is where every rank stands; `totals.py` becomes the Outcome.
"""

from __future__ import annotations

__all__ = ["evidence", "lookahead", "profiler", "totals", "user_stack"]
