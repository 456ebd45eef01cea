"""Texts of reports: calls, lines, ranks, waits and advice.

Nothing here decides anything; `phrases.py` is what every sentence is made of.
"""

from __future__ import annotations

__all__ = ["advice", "error_text", "phrases"]
