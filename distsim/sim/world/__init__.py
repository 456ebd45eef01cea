"""One simulated job: its processes, groups and stores, and which of its ranks are traced.

Start with `world.py`. `equal_ranks.py` knows which ranks do the same, `traced.py` who of them comes; what a world asks
of its faults is in `injected.py`.
"""

from __future__ import annotations

from distsim.sim.world.world import Setting, Surroundings, World

__all__ = ["Setting", "Surroundings", "World"]
