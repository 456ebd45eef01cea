"""torch.distributed.elastic: the processes that the launcher has started."""

from __future__ import annotations

__all__ = ["PROCESSES"]

PROCESSES = "_pc"
"""The attribute of MultiprocessContext that holds them."""
