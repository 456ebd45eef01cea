"""An allocation for which there was no room, and what held it."""

from __future__ import annotations

from dataclasses import dataclass

from distsim.sim.device.allocator.allocator import Allocator
from distsim.sim.device.allocator.claims import Claims, claim_all
from distsim.torch_compat.works import CURRENT_GRAPH_TASK_ID

__all__ = ["Shortage", "shortage"]

_current_graph_task_id = CURRENT_GRAPH_TASK_ID.get()


@dataclass(frozen=True, slots=True)
class Shortage:
    """Bytes, when torch.OutOfMemoryError was raised."""

    asked: int
    capacity: int
    """Of the GPU, without the context."""
    reserved: int
    allocated: int
    held: dict[str, int]
    """Of the allocated: by what it was for (ledger.py)."""
    asked_as: str
    """What was asked for was for (ledger.py)."""
    claims: Claims
    in_backward: bool

    @property
    def missing(self) -> int:
        """How much more would have been enough, were nothing lost between the blocks."""
        return max(0, self.allocated + self.asked - self.capacity)


def shortage(memory: Allocator, nbytes: int) -> Shortage:
    """*memory* has no room for *nbytes*."""
    claims = claim_all(memory)
    return Shortage(
        nbytes,
        min(memory.capacity, memory.allowed),
        memory.reserved,
        memory.allocated,
        memory.ledger.now(),
        memory.ledger.kind,
        claims,
        _current_graph_task_id() != -1,
    )
