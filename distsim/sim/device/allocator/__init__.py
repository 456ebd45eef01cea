"""Memory of a GPU: PyTorch's caching allocator, and what the memory is used for.

`allocator.py` has the allocator and its ledger; `claims.py` finds what tensors are used for.
"""

from __future__ import annotations

from distsim.sim.device.allocator.allocator import Allocator, Block, Full, Tallies, Tally, rounded

__all__ = ["Allocator", "Block", "Full", "Tallies", "Tally", "rounded"]
