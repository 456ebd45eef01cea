"""Monitor process of a host: it reads the rings of the ranks and reports faults.

`loop.py` watches the ranks and diagnoses; `host.py` reads the rings; `job_report.py` keeps and prints the report;
`peers.py` connects the monitors of several hosts by `protocol.py`, `sent_evidence.py` and `sent_calls.py`; `ends.py`
ends ranks.
"""

from __future__ import annotations

__all__ = [
    "ends",
    "host",
    "job_report",
    "loop",
    "peers",
    "protocol",
    "sent_calls",
    "sent_evidence",
    "slow_cause",
    "start",
    "straggler_watch",
]
