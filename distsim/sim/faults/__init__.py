"""Faults of a simulated world: rules in, strikes at calls, processes, links and tensors out.

Read `fault.py`: a rule and the fault that it is in one world. `rank_faults.py`, `link_faults.py`, `storage_faults.py`
and `tensors.py` have the kinds; `planted.py` asks those of a world, `links.py` has the state of its links.
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
