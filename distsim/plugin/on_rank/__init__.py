"""A test's body as one rank runs it (`body.py`): its fixtures, its `self`, its log, and how it ended (`report.py`).

A forked rank has copies of everything. Simulated ranks share one process: `fixtures.py`, `log.py` and `monkeypatch.py`
give each what it would have of its own there.
"""

from __future__ import annotations

__all__ = [
    "body",
    "fixtures",
    "log",
    "monkeypatch",
    "report",
]
