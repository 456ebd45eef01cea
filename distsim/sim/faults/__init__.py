"""Faults of a simulated world: rules in, strikes at calls, processes, links and tensors out.

Read `fault.py`: a rule and the fault that it is in one world. Each kind has its file, named as users name it, here,
in `ranks/` or in `links/`; `planted.py` asks those of a world, `tensors.py` is what guards look for.
"""

from __future__ import annotations

__all__ = [
    "corrupt",
    "fault",
    "lasting",
    "links",
    "master_unreachable",
    "moment",
    "planted",
    "ranks",
    "slow_storage",
    "store_unreachable",
    "tensors",
]
