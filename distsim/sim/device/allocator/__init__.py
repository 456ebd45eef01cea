"""A GPU's memory: PyTorch's caching allocator, and what its memory is taken for.

`allocator.py` has both; `claims.py` knows tensors for what they are.
"""

from __future__ import annotations

from distsim.sim.device.allocator.allocator import Allocator, Block, Full, Tallies, Tally, rounded

__all__ = ["Allocator", "Block", "Full", "Tallies", "Tally", "rounded"]
