"""The network: transfers over a cluster's links, in simpy's time.

`network.py` is what is asked of one; `fluid.py` (on `engine.py`, which shares links between flows) and its referee
`messages.py` are two, `fidelity.py` makes the one asked for; `bench.py` is nccl-tests' table.
"""

from __future__ import annotations

from distsim.network.answers import LinkBusy, Statistics, Timing, Transfer
from distsim.network.fidelity import make_network
from distsim.network.fluid import FluidNetwork
from distsim.network.messages import MessageNetwork
from distsim.network.network import Network

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
