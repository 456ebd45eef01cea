"""Level strict: a collective is made only once all of its members have called the same.

`strict.py` holds calls and makes them; `queue.py` is the queue of one group; `peers.py` reads the calls of other
ranks.
"""

from __future__ import annotations

__all__ = ["deferred", "messages", "peers", "queue", "refusal", "strict"]
