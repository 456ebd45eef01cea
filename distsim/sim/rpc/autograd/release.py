"""The end of a context, on all workers that know it."""

from __future__ import annotations

from typing import Any

from distsim.sim.rpc.agent.message import Message
from distsim.sim.rpc.autograd.context import Container

__all__ = ["release", "release_if_there"]


def release(container: Container, agent: Any, context_id: int) -> None:
    """`dist_autograd.context`'s end."""
    container.retrieve(context_id)
    release_if_there(container, agent, context_id)


def release_if_there(container: Container, agent: Any, context_id: int) -> None:
    """The same where another worker may have come first."""
    context = container.contexts.get(context_id)
    if context is None:
        return
    workers = list(context.workers)
    container.erase(context_id)
    if agent is not None:
        for worker in workers:
            agent.tell(worker, Message("CLEANUP_AUTOGRAD_CONTEXT_REQ", fields=context_id))
