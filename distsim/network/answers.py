"""What is asked of the network, and what it answers: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from distsim.collectives.transfer import Transfer

__all__ = ["LinkBusy", "Statistics", "Timing", "Transfer"]


@dataclass(frozen=True, slots=True)
class Timing:
    """When a transfer ran, and how."""

    start_s: float
    end_s: float
    algo: str
    proto: str
    channels: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters of a network since it was made."""

    num_collectives: int
    num_sends: int
    num_flows: int
    num_active_flows: int
    num_settlements: int
    """How often shared rates were worked out again."""
    bytes_moved: float
    """Over all links."""


@dataclass(frozen=True, slots=True)
class LinkBusy:
    """What one link did so far."""

    index: int
    bytes: float
    busy_s: float
    """While anything used it."""
    mean_utilisation: float
    """Of its specified bandwidth, over all the time so far."""
    peak_utilisation: float
