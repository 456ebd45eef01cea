"""The algorithms of collectives, compiled to steps of flows on a cluster's links.

One module an algorithm; each takes the members of a call and gives a plan.
"""

from __future__ import annotations

__all__ = [
    "direct",
    "ring",
    "tree",
]
