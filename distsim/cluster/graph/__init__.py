"""A cluster as a graph: devices, links, fabrics, and the routes between any two devices.

`cluster.py` is what others use; `wiring.py` puts hosts on one of `fabrics.py`.
"""

from __future__ import annotations

__all__ = [
    "cluster",
    "fabrics",
    "host_template",
    "link",
    "wiring",
]
