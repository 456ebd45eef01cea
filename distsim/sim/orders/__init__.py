"""Orders of the operations of ranks on messages and stores, in an exploration.

`mailbox.py` says which receive takes which message, also in ordinary runs; `stores.py` what each operation on a store
accesses, and when it is possible.
"""

from __future__ import annotations

__all__ = ["mailbox", "stores"]
