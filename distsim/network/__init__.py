"""The network: transfers as fluid flows over a cluster's links, in simpy's time."""

from __future__ import annotations

from distsim.network.network import Network
from distsim.network.transfer import LinkBusy, Statistics, Timing, Transfer

__all__ = ["LinkBusy", "Network", "Statistics", "Timing", "Transfer"]
