"""The call record, on which all of distsim builds, and its companions: ranks, evidence, diagnoses.

Start with `call.py`; `arguments.py` is the table of operations for every recorder of torch's calls, simulated or
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
    MainPosition,
    Phase,
    RankState,
    RankThread,
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
    "MainPosition",
    "Phase",
    "RankState",
    "RankThread",
    "Site",
    "State",
    "StoreWait",
    "Wait",
]
