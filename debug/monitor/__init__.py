"""The process beside the ranks of a host that reads their rings and reports what is wrong.

`loop.py` is its life; `host.py` what it sees; `peers.py` how monitors of several hosts act as one, by `protocol.py`;
`ends.py` how ranks are ended.
"""

from __future__ import annotations

__all__ = ["ends", "host", "loop", "peers", "process", "protocol", "start", "straggler_watch"]
