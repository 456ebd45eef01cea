"""The network interface, and the network that simulates every message."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, Protocol

import numpy as np
import simpy

from distsim.cluster import Cluster
from distsim.collectives import Compiler, Plan, PlannedMessage
from distsim.collectives.plan import Transfer
from distsim.errors import UsageError
from distsim.network.engine import Flow, FluidEngine
from distsim.network.fluid import FluidNetwork, LinkBusy, Statistics, Timing, after

MAX_RANKS = 256
"""Maximum group size; a collective of more ranks has millions of messages."""


class MessageNetwork(FluidNetwork):
    """Network that simulates every message of an algorithm.

    Sends, and algorithms without messages (NVLS), are simulated as flows.
    """

    def begin(self, transfer: Transfer, done: simpy.Event) -> None:
        """Start *transfer* now; *done* fires when it has ended."""
        plan = self.compiler.compile(transfer)
        if plan.messages is None:
            super().begin(transfer, done)
            return
        if len(transfer.devices) > MAX_RANKS:
            raise UsageError(
                f"expected at most {MAX_RANKS} ranks in a group with fidelity message, got "
                f"{len(transfer.devices)}: use fewer, or fidelity fluid"
            )
        after(self.env, plan.floor_s, lambda: self._send(plan, done, self.env.now - plan.floor_s))

    def fidelity_of(self, transfer: Transfer) -> str:
        """Return how *transfer* is simulated: `fluid` or `message`."""
        return "fluid" if self.compiler.compile(transfer).messages is None else "message"

    def _send(self, plan: Plan, done: simpy.Event, start_s: float) -> None:
        assert plan.messages is not None

        def finish() -> None:
            del self.runs[run]
            done.succeed(Timing(start_s, self.env.now, plan.algo, plan.proto, plan.channels))

        run = _MessageRun(self.env, self.engine, plan.messages(), finish, self.way)
        self.runs[run] = None
        run.begin()


class _MessageRun:
    """Sends each message when its predecessors have arrived and its queue is free, then calls *finish*."""

    def __init__(
        self,
        env: simpy.Environment,
        engine: FluidEngine,
        messages: list[PlannedMessage],
        finish: Callable[[], None],
        lead: Callable[[tuple[int, ...]], tuple[int, ...]],
    ) -> None:
        self._lead = lead
        """Returns the links that a message takes now."""
        self._flows: dict[int, Flow] = {}
        """Flows of the messages that are leaving their senders."""
        self._env = env
        self._engine = engine
        self._messages = messages
        self._finish = finish
        self._missing = [len(message.after) for message in messages]
        self._next: list[list[int]] = [[] for _ in messages]
        for index, message in enumerate(messages):
            for before in message.after:
                self._next[before].append(index)
        self._left = len(messages)
        self._queues: dict[tuple[int, int, int], deque[int]] = {}
        self._arrays: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    def begin(self) -> None:
        """Send every message without a predecessor."""
        if not self._messages:
            self._finish()
            return
        for index, missing in enumerate(self._missing):
            if missing == 0:
                self._ready(index)

    def _ready(self, index: int) -> None:
        queue = self._messages[index].queue
        if queue is None:
            self._send(index)
            return
        waiting = self._queues.get(queue)
        if waiting is None:
            self._queues[queue] = deque()
            self._send(index)
        else:
            waiting.append(index)

    def _send(self, index: int) -> None:
        message = self._messages[index]
        links, weights = self._way(message)
        flow = Flow(
            links,
            weights,
            message.nbytes,
            message.cap_bytes_per_s,
            lambda: self._left_sender(index),
            message.streams,
        )
        self._flows[index] = flow
        self._engine.start(flow)

    def _way(self, message: PlannedMessage) -> tuple[np.ndarray, np.ndarray]:
        way = self._lead(message.links)
        arrays = self._arrays.get(way)
        if arrays is None:
            links, weights = np.unique(np.asarray(way, dtype=np.int64), return_counts=True)
            arrays = self._arrays[way] = (links, weights.astype(np.float64))
        return arrays

    def lead_anew(self) -> None:
        """Move messages in flight to the links that they would take now."""
        for index, flow in self._flows.items():
            self._engine.move(flow, *self._way(self._messages[index]))

    def _left_sender(self, index: int) -> None:
        self._flows.pop(index, None)
        message = self._messages[index]
        if message.queue is not None:
            waiting = self._queues[message.queue]
            if waiting:
                self._send(waiting.popleft())
            else:
                del self._queues[message.queue]
        if message.latency_s <= 0.0:
            self._arrived(index)
            return
        timer = self._env.timeout(message.latency_s)
        timer.callbacks.append(lambda _: self._arrived(index))

    def _arrived(self, index: int) -> None:
        self._left -= 1
        for waiting in self._next[index]:
            self._missing[waiting] -= 1
            if self._missing[waiting] == 0:
                self._ready(waiting)
        if self._left == 0:
            self._finish()


class Network(Protocol):
    """Runs transfers on a cluster in the time of a simpy environment, and takes faults of links."""

    env: simpy.Environment
    cluster: Cluster
    compiler: Compiler
    """Chooses algorithms and makes plans of them."""

    def collective(self, transfer: Transfer) -> simpy.Event:
        """Start *transfer* now. The event fires with a `Timing` when the last byte has arrived."""

    def fidelity_of(self, transfer: Transfer) -> str:
        """Return how *transfer* is simulated: `fluid` or `message`."""

    def send(
        self, src_device: str, dst_device: str, nbytes: int, flavour: str = "nccl", flow_key: int = 0
    ) -> simpy.Event:
        """Start a point-to-point transfer between two ranks that are ready.

        Args:
            src_device: Device of the sender, such as `n0/gpu0`.
            dst_device: Device of the receiver.
            nbytes: Size of the message in bytes.
            flavour: Library whose protocol is used: `nccl`, `gloo` or `mpi`.
            flow_key: Number that selects one of several equal paths (ECMP).

        Returns:
            An event that fires with a `Timing` when the last byte has arrived.
        """

    def send_channels(
        self, src_device: str, dst_device: str, nbytes: int, flavour: str = "nccl", flow_key: int = 0
    ) -> int:
        """Return the number of channels that such a transfer uses."""

    def set_link(
        self, index: int, bandwidth_factor: float = 1.0, extra_latency_s: float = 0.0, up: bool = True
    ) -> None:
        """Change a link now, also for transfers in flight.

        Args:
            index: Index in `Cluster.links`.
            bandwidth_factor: Fraction of the link's bandwidth that remains.
            extra_latency_s: Seconds added to the link's latency.
            up: False cuts the link; transfers over it stop until it is up again.
        """

    def reroute(self, instead: Mapping[int, int]) -> None:
        """From now on, replace each link that is a key of *instead* by its value."""

    def lead_around(self, down: Collection[int]) -> None:
        """From now on, route transfers around the links *down* wherever the fabric has another path."""

    def stalled(self) -> list[int]:
        """Return the links that are down while a transfer waits to cross them."""

    def links_busy(self, most: int | None = None) -> list[LinkBusy]:
        """Return the traffic of each link that was used, in the order of `Cluster.links`.

        If that are more than *most*, return one link of those with the same kind, bandwidth and percent of use.
        """

    def utilisation_samples(self, max_links: int = 64) -> list[tuple[float, int, float]]:
        """Return (time_s, link, fraction used until the next sample) of the *max_links* busiest links."""

    def statistics(self) -> Statistics:
        """Return counters since the network was created."""


NETWORKS: Mapping[str, type[FluidNetwork]] = {"fluid": FluidNetwork, "message": MessageNetwork}
"""Networks by the value of `--fidelity`."""


def make_network(
    env: simpy.Environment, cluster: Cluster, *, fidelity: Literal["fluid", "message"] = "fluid", **forced: Any
) -> Network:
    """Create a network.

    Args:
        env: simpy environment whose time the network uses, in seconds.
        cluster: Cluster whose links the network simulates.
        fidelity: `fluid` shares links between flows; `message` simulates every message, for at most 256 ranks.
        **forced: Choices that replace those of NCCL: `algo`, `proto`, `nccl_version` and `launcher` (`process` if each
            GPU has a process, `shared` if one process drives all GPUs of a node).

    Raises:
        UsageError: The fidelity is not known.
    """
    if fidelity not in NETWORKS:
        raise UsageError(f"expected fidelity {' or '.join(NETWORKS)}, got {fidelity!r}")
    return NETWORKS[fidelity](env, cluster, **forced)
