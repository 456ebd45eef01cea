"""FSDP2's shards: an empty one for all ranks that have none, and word of it where they are not all of one size.

Each rank cuts each parameter for all ranks and keeps its own part. A parameter of 4,096 rows on 16,384 GPUs has 12,288
parts without anything in them, which torch makes one by one, twice: hours of them on the ranks that are traced.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from distsim.sim.kernel.task import current_process

__all__ = ["MODULE", "EmptyShards"]

MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param"
"""What cuts them; programs import it with the first `fully_shard`."""
_FUNCTION = "_chunk_with_empty"


def _chunk_with_empty(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """As torch/distributed/fsdp/_fully_shard/_fsdp_common.py (2.13), whose callers take one part and drop the rest."""
    chunks = list(torch.chunk(tensor, num_chunks, dim=dim))
    missing = num_chunks - len(chunks)
    process: Any = current_process()
    if process is not None and (missing or chunks[-1].shape != chunks[0].shape):
        process.world.traced.cuts_unevenly = True
    return chunks + [chunks[0].new_empty(0)] * missing if missing else chunks


class EmptyShards:
    """For the time of one simulation."""

    def __init__(self) -> None:
        self._real: Any = None

    def begin(self, module: ModuleType | None) -> None:
        """*module* (`MODULE`) is there, or None."""
        if module is not None and self._real is None and hasattr(module, _FUNCTION):
            self._real = getattr(module, _FUNCTION)
            setattr(module, _FUNCTION, _chunk_with_empty)

    def end(self) -> None:
        """torch's own is back."""
        if self._real is not None:
            setattr(sys.modules[MODULE], _FUNCTION, self._real)
        self._real = None
