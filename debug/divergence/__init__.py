"""Where did a rank leave the common order of calls, and how: skipped, added, swapped?

`find.py` is asked; `realign.py`, `by_site.py`, `history.py` and `source_order.py` are its witnesses.
"""

from __future__ import annotations

__all__ = ["by_site", "divergence", "find", "history", "not_arrived", "realign", "source_order"]
