"""The network: transfers over a cluster's links, in simpy's time.

`network.py` is what is asked of one and makes it; `fluid.py` (on `engine.py`, which shares links between flows) and its
referee `messages.py` are two; `bench.py` is nccl-tests' table.
"""

from __future__ import annotations

from distsim.network.answers import LinkBusy, Statistics, Timing, Transfer
from distsim.network.fluid import FluidNetwork
from distsim.network.messages import MessageNetwork
from distsim.network.network import Network, make_network

__all__ = [
    "FluidNetwork",
    "LinkBusy",
    "MessageNetwork",
    "Network",
    "Statistics",
    "Timing",
    "Transfer",
    "make_network",
]
