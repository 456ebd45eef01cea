"""Exceptions that only say what others did: a call that timed out, a peer that went away."""

from __future__ import annotations

__all__ = ["own_fault", "timed_out"]

TIMEOUTS = ("timed out", "timeout", "time out")
LOSSES = ("peer", "connection", "socket", "pipe", "remote", "nccl", "abort", "store")
"""Words in the errors of gloo, NCCL and their stores when the other end is gone."""


def timed_out(exception: str | None) -> bool:
    """A call that gave up waiting."""
    return exception is not None and any(word in exception.lower() for word in TIMEOUTS)


def own_fault(exception: str | None) -> bool:
    """An exception that no other rank has caused, as far as its words tell."""
    if exception is None or timed_out(exception):
        return False
    return not any(word in exception.lower() for word in LOSSES)
