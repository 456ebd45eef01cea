"""Matches calls with each other and checks whether they agree: pure comparisons of records.

`index.py` sorts evidence into meetings; `agreement.py` checks one meeting; `comparer.py` compares calls as they
arrive.
"""

from __future__ import annotations

__all__ = ["agreement", "comparer", "index", "secondary_errors"]
