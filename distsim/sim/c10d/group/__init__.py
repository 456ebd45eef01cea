"""The simulated process group. `group.py` has the way of every call, `questions.py` what else torch asks.

One `SimGroup` is one rank's handle on a communicator.
"""

from __future__ import annotations

from distsim.sim.c10d.group.group import SimGroup
from distsim.sim.c10d.group.newer import hook_patches

__all__ = ["SimGroup", "hook_patches"]
