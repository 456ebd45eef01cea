"""Simulates transfers over the links of a cluster, in virtual time (simpy).

`network.py` has the interface, and the network that simulates each message. `fluid.py` has the fluid network and its
results, on `engine.py`, which shares links between flows and counts their traffic. `bench.py` has the table of
nccl-tests.
"""

from __future__ import annotations

from distsim.collectives.plan import Transfer
from distsim.network.fluid import FluidNetwork, LinkBusy, Statistics, Timing
from distsim.network.network import MessageNetwork, Network, make_network

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
