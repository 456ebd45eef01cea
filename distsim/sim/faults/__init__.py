"""Injected faults of a simulated world: rules, and what they do to calls, processes, links and tensors.

`fault.py` defines a rule and the fault that it becomes in one world. `rank_faults.py`, `link_faults.py`,
`storage_faults.py` and `tensors.py` define the kinds; `planted.py` calls the faults of a world, and `links.py` holds
the state of its links.
"""

from __future__ import annotations

__all__ = [
    "fault",
    "link_faults",
    "links",
    "planted",
    "rank_faults",
    "storage_faults",
    "tensors",
]
