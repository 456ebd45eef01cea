"""The networks there are, by how closely each looks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import simpy

from distsim.cluster import Cluster
from distsim.errors import UsageError
from distsim.network.fluid import FluidNetwork
from distsim.network.messages import MessageNetwork
from distsim.network.network import Network

__all__ = ["NETWORKS", "make_network"]

NETWORKS: Mapping[str, type[FluidNetwork]] = {"fluid": FluidNetwork, "message": MessageNetwork}
"""`--fidelity`: fluid (phases of coupled flows), or message (every message on its own, for small worlds)."""


def make_network(env: simpy.Environment, cluster: Cluster, *, fidelity: str = "fluid", **forced: Any) -> Network:
    """The network of that *fidelity* on *cluster* in *env*'s time; *forced* is as `FluidNetwork` takes it."""
    if fidelity not in NETWORKS:
        raise UsageError(f"expected fidelity {' or '.join(NETWORKS)}, got {fidelity!r}")
    return NETWORKS[fidelity](env, cluster, **forced)
