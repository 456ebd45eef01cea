"""The network: transfers over a cluster's links, in simpy's time.

`network.py` makes one and has the referee of explicit messages; `fluid.py` is the other (on `engine.py`, which shares
links between flows); `usage.py` is what is asked and answered; `bench.py` is nccl-tests' table.
"""

from __future__ import annotations

from distsim.network.fluid import FluidNetwork
from distsim.network.network import MessageNetwork, Network, make_network
from distsim.network.usage import LinkBusy, Statistics, Timing, Transfer

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
