"""A GPU's memory. `allocator.py` is PyTorch's caching allocator, `ledger.py` what the memory was taken for, `claims.py`
how tensors are known for what they are."""

from __future__ import annotations

from distsim.sim.device.allocator.allocator import Allocator, Block, Full, Tallies, Tally, rounded

__all__ = ["Allocator", "Block", "Full", "Tallies", "Tally", "rounded"]
