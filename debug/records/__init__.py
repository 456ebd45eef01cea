"""The call record, the one currency of distsim, and what is said of calls: ranks, evidence, diagnoses.

Start with `call.py`; `arguments.py` is the one table of operations, for whoever records torch's calls, simulated or
real. Nothing here knows a ring or a clock, or imports torch.
"""

from __future__ import annotations

from distsim.debug.records.call import (
    COLLECTIVES,
    P2P,
    CallRecord,
    CallWait,
    Caught,
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
    "Caught",
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
