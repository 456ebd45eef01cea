"""Monitor process of a host: it reads the rings of the ranks and reports faults.

`loop.py` watches and judges; `host.py` reads the rings; `ends.py` keeps and prints the report and ends ranks;
`peers.py` connects the monitors of several hosts by `protocol.py`.
"""

from __future__ import annotations

__all__ = ["ends", "host", "loop", "peers", "protocol", "start", "straggler_watch"]
