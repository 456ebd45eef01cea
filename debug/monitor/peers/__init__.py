"""Monitors of several hosts as one: the one beside rank 0 leads, the others tell it what they see.

`part.py` is what one monitor plays in it; `protocol.py` and `link.py` are how they talk.
"""

from __future__ import annotations

__all__ = ["link", "part", "protocol"]
