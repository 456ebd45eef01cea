"""Memory of a GPU: PyTorch's caching allocator, and what the memory is used for.

`allocator.py` has the allocator and its ledger, `expandable.py` the allocator with `expandable_segments:True`;
`claims.py` finds what tensors are used for.
"""

from __future__ import annotations

from distsim.sim.device.allocator.allocator import Allocator, Block, Full, Tallies, Tally, rounded
from distsim.sim.device.allocator.expandable import ExpandableAllocator, is_expandable

__all__ = ["Allocator", "Block", "ExpandableAllocator", "Full", "Tallies", "Tally", "is_expandable", "rounded"]
