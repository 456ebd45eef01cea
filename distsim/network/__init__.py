"""The network: transfers over the links of a cluster, in the time of simpy.

`network.py` has the interface and the network that simulates every message. `fluid.py` has the fluid network, on
`engine.py`, which shares links between flows. `usage.py` has requests, results and counters, and `bench.py` the table
of nccl-tests.
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
