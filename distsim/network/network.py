"""What the simulator asks of a network, whichever: collectives and sends on one cluster, in simpy's time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import simpy

from distsim.cluster import Cluster
from distsim.network.answers import LinkBusy, Statistics, Transfer

__all__ = ["Network"]


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
