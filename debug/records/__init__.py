"""The call record, the one currency of distsim, and what is said of calls: ranks, evidence, diagnoses.

Start with `call.py`; nothing here knows a ring, a clock or torch.
"""

from __future__ import annotations

from distsim.debug.records.call import (
    COLLECTIVES,
    P2P,
    CallRecord,
    CallWait,
    Evidence,
    Finding,
    Group,
    HostWait,
    Phase,
    RankState,
    Site,
    State,
    StoreWait,
    Wait,
)

__all__ = [
    "COLLECTIVES",
    "P2P",
    "CallRecord",
    "CallWait",
    "Evidence",
    "Finding",
    "Group",
    "HostWait",
    "Phase",
    "RankState",
    "Site",
    "State",
    "StoreWait",
    "Wait",
]
