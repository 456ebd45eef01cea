"""Which calls belong together, and whether they agree: pure comparisons of records.

`index.py` sorts evidence into meetings; `agreement.py` checks one; `comparer.py` does it as calls arrive.
"""

from __future__ import annotations

__all__ = ["agreement", "comparer", "index", "refused", "remote_calls", "secondary_errors"]
