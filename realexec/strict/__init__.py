"""The strict level: a collective goes out only when all its members have called the same.

`strict.py` holds calls and lets them go; `queue.py` is one group's; `peers.py` is what the other ranks say of a call.
"""

from __future__ import annotations

__all__ = ["deferred", "messages", "peers", "queue", "refusal", "strict"]
