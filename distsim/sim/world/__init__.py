"""One simulated job: its processes, groups and stores, and which of its ranks are traced.

Start with `world.py`. `traced.py` decides whether all ranks are traced, `equal_ranks.py` which are in a sample, and
`undo.py` takes back what a run that begins anew has written.
"""

from __future__ import annotations

from distsim.sim.world.world import Setting, Surroundings, World

__all__ = ["Setting", "Surroundings", "World"]
