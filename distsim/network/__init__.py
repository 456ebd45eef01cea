"""The network: transfers as fluid flows over a cluster's links, in simpy's time.

`engine.py` shares links between flows; `messages.py` is its referee, message by message; `bench.py` nccl-tests' table.
"""

from __future__ import annotations

from distsim.network.answers import LinkBusy, Statistics, Timing, Transfer
from distsim.network.network import Network

__all__ = ["LinkBusy", "Network", "Statistics", "Timing", "Transfer"]
