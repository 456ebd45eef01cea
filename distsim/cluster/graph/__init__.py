"""A cluster as a graph: devices, links, fabrics, and the routes between any two devices.

`cluster.py` is what others use; `wiring.py` puts hosts on a fabric.
"""

from __future__ import annotations

__all__ = [
    "any_graph",
    "bisection",
    "cluster",
    "facts",
    "grid_fabric",
    "host_template",
    "link",
    "many_routes",
    "reroute",
    "tree_fabric",
    "wiring",
]
