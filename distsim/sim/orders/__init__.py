"""Orders of the operations of ranks on messages and stores, in an exploration.

`mailbox.py` says which receive takes which message, also in ordinary runs; `stores.py` what each operation on a store
accesses, and when it is possible; `requests.py` which remote call a worker serves next; `files.py` in which order ranks
access files; `processes.py` who uses a pipe first, and when a process ends.
"""

from __future__ import annotations

__all__ = ["files", "mailbox", "processes", "requests", "stores"]
