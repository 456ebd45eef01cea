"""The process beside the ranks of a host that reads their rings and reports what is wrong.

`loop.py` watches and judges; `host.py` reads the rings; `job_report.py` keeps and prints the report; `peers.py`
connects the monitors of several hosts by `protocol.py`; `ends.py` ends ranks.
"""

from __future__ import annotations

__all__ = ["ends", "host", "job_report", "loop", "peers", "process", "protocol", "start", "straggler_watch"]
