"""Faults of ranks: what befalls a process, and what makes it slow.

`rank_fault.py` is what those have in common that strike once, at a time or at a call; each fault is a file.
"""

from __future__ import annotations

__all__ = ["crash", "delay", "exception", "exit", "freeze", "jitter", "rank_fault", "straggler"]
