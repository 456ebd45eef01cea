"""A cluster as a graph: devices, links, fabrics, and the routes between any two devices.

Other packages use `cluster.py`; `wiring.py` connects hosts to one of the fabrics of `fabrics.py`, and
`mixed_hosts.py` hosts of several kinds.
"""

from __future__ import annotations

__all__ = [
    "cluster",
    "fabrics",
    "host_template",
    "link",
    "mixed_hosts",
    "wiring",
]
