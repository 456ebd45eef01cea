"""Faults of links, NICs and switches: rules about the fabric, and what they have done to it.

`network_fault.py` is what they share, `state.py` the links of one world; each fault is a file.
"""

from __future__ import annotations

__all__ = [
    "link_cut",
    "link_flap",
    "link_lossy",
    "link_slow",
    "names",
    "network_fault",
    "nic_down",
    "part_down",
    "stalled",
    "state",
    "switch_down",
]
