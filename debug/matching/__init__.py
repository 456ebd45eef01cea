"""Which calls belong together, and whether they agree: pure comparisons of records.

`index.py` sorts evidence into meetings; `agreement.py` checks one; the comparers do it as calls arrive.
"""

from __future__ import annotations

__all__ = [
    "agreement",
    "aspect",
    "comparer",
    "index",
    "majority",
    "message_comparer",
    "refused",
    "remote_calls",
    "secondary_errors",
    "sizes",
]
