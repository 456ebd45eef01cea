"""The words of reports: calls, lines, ranks, waits and advice as people write them.

Nothing here decides anything; `phrases.py` is what every sentence is made of.
"""

from __future__ import annotations

__all__ = ["advice", "error_text", "phrases"]
