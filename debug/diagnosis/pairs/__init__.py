"""What two ranks have with each other: messages that do not meet or do not fit, remote calls that nobody answers.

`messages.py` and `remote_calls.py`; `suspected_messages.py` is for live jobs.
"""

from __future__ import annotations

__all__ = ["messages", "remote_calls", "suspected_messages"]
