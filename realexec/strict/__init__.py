"""The strict level: a collective goes out only when all its members have called the same.

`strict.py` is the group; `peers.py` is what the other ranks say of a call.
"""

from __future__ import annotations

__all__ = ["deferred", "messages", "peers", "strict"]
