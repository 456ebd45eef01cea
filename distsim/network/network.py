"""The networks there are, by how closely each looks, and what the simulator asks of one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import simpy

from distsim.cluster import Cluster
from distsim.errors import UsageError
from distsim.network.answers import LinkBusy, Statistics, Transfer
from distsim.network.fluid import FluidNetwork
from distsim.network.messages import MessageNetwork

__all__ = ["NETWORKS", "Network", "make_network"]


class Network(Protocol):
    """Runs transfers on *cluster* in *env*'s time. Beside transfers it is told of links that go wrong."""

    env: simpy.Environment
    cluster: Cluster

    def collective(self, transfer: Transfer) -> simpy.Event:
        """Start *transfer* now. The event fires when the last byte is there, with a `Timing`."""

    def fidelity_of(self, transfer: Transfer) -> str:
        """How *transfer* is simulated: fluid or message."""

    def send(
        self, src_device: str, dst_device: str, nbytes: int, flavour: str = "nccl", flow_key: int = 0
    ) -> simpy.Event:
        """Start a point-to-point transfer now, between two ranks that are both ready; the event is as
        above."""

    def send_channels(
        self, src_device: str, dst_device: str, nbytes: int, flavour: str = "nccl", flow_key: int = 0
    ) -> int:
        """How many channels such a transfer takes."""

    def set_link(
        self, index: int, bandwidth_factor: float = 1.0, extra_latency_s: float = 0.0, up: bool = True
    ) -> None:
        """Change a link now, for what is under way too: a fraction of its bandwidth, a longer latency, or
        cut. Over a cut link nothing moves until it is up again."""

    def reroute(self, instead: Mapping[int, int]) -> None:
        """From now on, what would go over a link of *instead* goes over the link it names."""

    def lead_around(self, down: Collection[int]) -> None:
        """From now on, the fabric leads what is under way and what comes around the links *down*, where its
        switches have another way."""

    def stalled(self) -> list[int]:
        """Links that are down while something waits to cross them."""

    def links_busy(self) -> list[LinkBusy]:
        """What each link that was used did so far, in the order of `Cluster.links`."""

    def utilisation_samples(self, max_links: int = 64) -> list[tuple[float, int, float]]:
        """(time_s, link, fraction used until the next sample), for the *max_links* links that were
        busiest."""

    def statistics(self) -> Statistics:
        """Counters since the network was made."""


NETWORKS: Mapping[str, type[FluidNetwork]] = {"fluid": FluidNetwork, "message": MessageNetwork}
"""`--fidelity`: fluid (phases of coupled flows), or message (every message on its own, for small worlds)."""


def make_network(env: simpy.Environment, cluster: Cluster, *, fidelity: str = "fluid", **forced: Any) -> Network:
    """The network of that *fidelity* on *cluster* in *env*'s time; *forced* is as `FluidNetwork` takes it."""
    if fidelity not in NETWORKS:
        raise UsageError(f"expected fidelity {' or '.join(NETWORKS)}, got {fidelity!r}")
    return NETWORKS[fidelity](env, cluster, **forced)
