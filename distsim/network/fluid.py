"""The network as fluid: a transfer is phases of coupled flows, which share the links in simpy's time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import simpy
from numpy.typing import NDArray

from distsim.cluster import Cluster
from distsim.collectives import Compiler, Loads, Overlap, Plan, PlanPhase, compiler_of
from distsim.collectives.plan import Transfer
from distsim.errors import UsageError
from distsim.network.engine import Flow, FluidEngine, detour


@dataclass(frozen=True, slots=True)
class Timing:
    """When a transfer ran, with its algorithm, protocol and number of channels."""

    start_s: float
    end_s: float
    algo: str
    proto: str
    channels: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters of a network since it was created."""

    num_collectives: int
    num_sends: int
    num_flows: int
    num_active_flows: int
    num_settlements: int
    """Number of times that the rates of flows were recomputed."""


@dataclass(frozen=True, slots=True)
class LinkBusy:
    """Traffic of one link so far."""

    index: int
    bytes: float
    busy_s: float
    """Time in seconds in which a flow used the link."""
    mean_utilisation: float
    """Fraction of the specified bandwidth, over the whole time so far."""
    peak_utilisation: float
    alike: int = 1
    """Number of links that it represents."""


class ActiveTransfer(Protocol):
    """A transfer that has started and not ended."""

    def lead_anew(self) -> None:
        """Recompute the routes of the flows under way, because the fabric has changed its routes."""


class FluidNetwork:
    """Carries out transfers on *cluster* in the virtual time of *env*; see `Network`.

    *algo*, *proto* and *nccl_version* force NCCL's choices. *launcher* is `process` (a process for each GPU) or
    `shared` (one process drives all GPUs of a node, and launches a kernel for each).
    """

    def __init__(
        self,
        env: simpy.Environment,
        cluster: Cluster,
        *,
        algo: str | None = None,
        proto: str | None = None,
        nccl_version: str | None = None,
        launcher: str = "process",
    ) -> None:
        self.env = env
        self.cluster = cluster
        self._forced: dict[str, Any] = {
            "algo": algo,
            "proto": proto,
            "nccl_version": nccl_version,
            "launcher": launcher,
        }
        self.compiler = compiler_of(cluster, **self._forced)
        self._is_led_around = False
        capacity = self.compiler.links.capacity
        self._pristine: NDArray[np.float64] = capacity
        self._extra_s = np.zeros(len(capacity))
        self._slowed = False
        self._instead: dict[int, int] = {}
        self.engine = FluidEngine(env, capacity)
        self.runs: dict[ActiveTransfer, None] = {}
        """Active transfers in the order of their start."""
        self._num_collectives = 0
        self._num_sends = 0

    def collective(self, transfer: Transfer) -> simpy.Event:
        """Start *transfer* now. The returned event fires when the last byte has arrived, with a `Timing`."""
        self._num_collectives += 1
        done = self.env.event()
        self.begin(transfer, done)
        return done

    def begin(self, transfer: Transfer, done: simpy.Event) -> None:
        """Carry out *transfer*; *done* succeeds with its `Timing`."""
        FluidRun(self, lambda: self.compiler.compile(transfer), done)

    def fidelity_of(self, transfer: Transfer) -> str:
        return "fluid"

    def send(
        self, src_device: str, dst_device: str, nbytes: int, flavour: str = "nccl", flow_key: int = 0
    ) -> simpy.Event:
        """Start a point-to-point transfer now, between two ranks that are both ready; the event is as
        above."""
        self._num_sends += 1
        done = self.env.event()
        FluidRun(self, lambda: self.compiler.compile_send(src_device, dst_device, nbytes, flavour, flow_key), done)
        return done

    def send_channels(
        self, src_device: str, dst_device: str, nbytes: int, flavour: str = "nccl", flow_key: int = 0
    ) -> int:
        """Return the number of channels of such a transfer."""
        return self.compiler.compile_send(src_device, dst_device, nbytes, flavour, flow_key).channels

    def set_link(
        self, index: int, bandwidth_factor: float = 1.0, extra_latency_s: float = 0.0, up: bool = True
    ) -> None:
        """Change a link now, also for flows under way: a fraction of its bandwidth, additional latency, or down.

        Nothing moves over a link that is down until it is up again.
        """
        if not 0 <= index < len(self._pristine):
            raise UsageError(f"expected a link from 0 to {len(self._pristine) - 1}, got {index}")
        if bandwidth_factor < 0 or extra_latency_s < 0:
            raise UsageError(
                "expected a bandwidth factor and a latency of zero or more, "
                f"got {bandwidth_factor} and {extra_latency_s}"
            )
        self._extra_s[index] = extra_latency_s
        self._slowed = bool(self._extra_s.any())
        self.engine.set_capacity(index, float(self._pristine[index]) * bandwidth_factor if up else 0.0)

    def reroute(self, instead: Mapping[int, int]) -> None:
        """From now on, replace each link that is a key of *instead* by its value."""
        self._instead = {a: b for a, b in {**self._instead, **instead}.items() if a != b}
        self.engine.reroute(self._instead)

    def lead_around(self, down: Collection[int]) -> None:
        """From now on, route transfers around the links *down* wherever the fabric has another path."""
        if not self._is_led_around:
            self.compiler, self._is_led_around = Compiler(self.cluster, **self._forced), True
        self.compiler.lead_around(down)
        for run in self.runs:
            run.lead_anew()

    def way(self, links: tuple[int, ...]) -> tuple[int, ...]:
        """Return the route that a transfer over *links* takes now, with detours around links that are down."""
        around = self.compiler.links.around
        led = links if around is None else around.route(links)
        return tuple(self._instead.get(link, link) for link in led) if self._instead else led

    def by_detour(self, flow: Flow) -> Flow:
        """Return *flow* with a route around links that are down."""
        if self._instead:
            flow.links, flow.weights = detour(flow.links, flow.weights, self._instead)
        return flow

    def stalled(self) -> list[int]:
        """Return links that are down while something waits to cross them."""
        return self.engine.stalled()

    def extra_latency_s(self, links: NDArray[np.int64]) -> float:
        """Return the latency that faults add to a transfer over *links*."""
        return float(self._extra_s[links].max(initial=0.0)) if self._slowed else 0.0

    def links_busy(self, most: int | None = None) -> list[LinkBusy]:
        """Return the traffic of each link that was used, in the order of `Cluster.links`.

        If that are more than *most*, return one link of those with the same kind, bandwidth and percent of use.
        """
        usage, now = self.engine.usage, self.env.now
        used = np.flatnonzero(usage.bytes)
        rates = self.cluster.links.bandwidth_bytes_per_s[used]
        moved, busy = usage.bytes[used], usage.busy_until(now)[used]
        means = moved / (rates * now) if now > 0 else np.zeros(len(used))
        peaks = np.maximum(means, np.minimum(1.0, usage.peaks(used)))
        chosen, alike = np.arange(len(used)), np.ones(len(used), dtype=np.int64)
        if most is not None and len(used) > most:
            chosen, alike = self._one_of_alike(used, moved, means, peaks)
        columns = used, moved, busy, means, peaks
        return list(map(LinkBusy, *(column[chosen].tolist() for column in columns), alike.tolist()))

    def _one_of_alike(
        self,
        used: NDArray[np.int64],
        moved: NDArray[np.float64],
        means: NDArray[np.float64],
        peaks: NDArray[np.float64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the place in *used* of the busiest link of each class, and the size of the class."""
        links = self.cluster.links
        alike = np.unique(links.bandwidth_bytes_per_s[used], return_inverse=True)[1].astype(np.int64)
        for kind in ("nvlink", "c2c", "pcie", "socket", "nic", "fabric"):
            alike = 2 * alike + links.are((kind,))[used]
        for share in (means, peaks):
            alike = 128 * alike + np.rint(100 * share).astype(np.int64)
        order = np.argsort(-moved, kind="stable")
        _, first, counts = np.unique(alike[order], return_index=True, return_counts=True)
        chosen = order[first]
        by_index = np.argsort(chosen)
        return chosen[by_index], counts[by_index]

    def utilisation_samples(self, max_links: int = 64) -> list[tuple[float, int, float]]:
        """Return (time_s, link, fraction used until the next sample), for the *max_links* links that were busiest."""
        width_s, fractions = self.engine.usage.fractions()
        moved = self.engine.usage.bytes
        order = np.argsort(-(moved / self._pristine), kind="stable")[:max_links]
        chosen = [int(index) for index in order if moved[index] > 0]
        samples: list[tuple[float, int, float]] = []
        for index in chosen:
            before = -1.0
            column = fractions[:, index]
            for number, fraction in enumerate(column.tolist()):
                rounded = round(min(1.0, fraction), 4)
                if rounded != before:
                    samples.append((number * width_s, index, rounded))
                    before = rounded
            if before > 0.0:
                samples.append((len(column) * width_s, index, 0.0))
        samples.sort(key=lambda sample: (sample[0], sample[1]))
        return samples

    def statistics(self) -> Statistics:
        """Return counters since the network was created."""
        engine = self.engine
        return Statistics(
            self._num_collectives,
            self._num_sends,
            engine.num_flows,
            engine.num_active,
            engine.num_settlements,
        )


_BESIDE = -1


class FluidRun:
    """A plan that is being run: first its minimum time, then the flow and latency of each phase."""

    __slots__ = ("done", "flows", "make", "network", "num_over", "plan", "start_s")

    def __init__(self, network: FluidNetwork, make: Callable[[], Plan], done: simpy.Event) -> None:
        self.network = network
        self.make = make
        self.plan = make()
        self.done = done
        self.start_s = network.env.now
        self.num_over = 0
        """Number of completed phases."""
        self.flows: dict[Flow, tuple[int, ...]] = {}
        """Flows under way, with the position of their phase in the plan: an index into `phases`, then into `then`, and
        so on; flows of an overlap have `_BESIDE` appended.
        """
        network.runs[self] = None
        after(network.env, self.plan.floor_s, self._next)

    def lead_anew(self) -> None:
        """Plan the remaining phases again, and move active ones to their new links."""
        plan = self.make()
        if plan.algo != self.plan.algo or len(plan.phases) != len(self.plan.phases):
            return  # another algorithm: this one is not left in the middle
        if _shape(plan.phases) != _shape(self.plan.phases):  # the same in other parts: these go on, the new way
            phases = tuple(_led(old, new) for old, new in zip(self.plan.phases, plan.phases, strict=True))
            plan = replace(self.plan, phases=phases)
        self.plan = plan
        for flow, where in self.flows.items():
            loads = self._loads(where)
            links, weights = detour(loads.links, loads.weights, self.network._instead)
            self.network.engine.move(flow, links, weights)

    def _phase(self, where: tuple[int, ...]) -> PlanPhase:
        phase = self.plan.phases[where[0]]
        for i in where[1:]:
            phase = phase.then[i]
        return phase

    def _loads(self, where: tuple[int, ...]) -> Loads:
        if where[-1] != _BESIDE:
            return self._phase(where).loads
        overlap = self._phase(where[:-1]).overlap
        assert overlap is not None
        return overlap.loads

    def _next(self) -> None:
        plan = self.plan
        network = self.network
        if self.num_over == len(plan.phases):
            del network.runs[self]
            self.done.succeed(Timing(self.start_s, network.env.now, plan.algo, plan.proto, plan.channels))
            return
        self.num_over += 1
        self._begin((self.num_over - 1,), self._next)

    def _begin(self, where: tuple[int, ...], over: Callable[[], None]) -> None:
        """Start the phase at index *where*, and call *over* when it has ended."""
        phase = self._phase(where)
        if phase.overlap is not None:
            over = _both(over)
            self._follow(where, phase.overlap, over)
        latency_s = phase.latency_s + self.network.extra_latency_s(phase.loads.links)

        def drained() -> None:
            after(self.network.env, latency_s, lambda: self._split(where, over))

        self._carry(where, phase.progress_bytes, phase.cap_bytes_per_s, phase.streams, drained)

    def _carry(
        self, where: tuple[int, ...], nbytes: float, cap_bytes_per_s: float, streams: float, over: Callable[[], None]
    ) -> None:
        """Send *nbytes* over the loads at *where*, and call *over* when they have left."""
        if nbytes <= 0.0:
            over()
            return

        def drained() -> None:
            del self.flows[flow]
            over()

        loads = self._loads(where)
        flow = self.network.by_detour(Flow(loads.links, loads.weights, nbytes, cap_bytes_per_s, drained, streams))
        self.flows[flow] = where
        self.network.engine.start(flow)

    def _follow(self, where: tuple[int, ...], overlap: Overlap, over: Callable[[], None]) -> None:
        """Run the overlapped transfers of the phase at index *where*, piece by piece."""
        env = self.network.env
        start_s, gone, busy_s, since_s = env.now, 0, 0.0, 0.0

        def send(nbytes: float) -> None:
            nonlocal since_s
            since_s = env.now
            self._carry((*where, _BESIDE), nbytes, overlap.cap_bytes_per_s, overlap.streams, follow)

        def follow() -> None:
            nonlocal gone, busy_s
            busy_s += env.now - since_s
            if gone == overlap.pieces:
                late_s = overlap.share * (busy_s - overlap.busy_s)
                after(env, start_s + overlap.way_s + late_s - env.now, over)
                return
            gone += 1
            after(env, start_s + gone * overlap.every_s - env.now, lambda: send(overlap.piece_bytes))

        send(overlap.first_bytes)

    def _split(self, where: tuple[int, ...], over: Callable[[], None]) -> None:
        """Start the phases that follow the one at *where*, which has sent its last byte."""
        left = len(self._phase(where).then)
        if not left:
            over()
            return

        def one_over() -> None:
            nonlocal left
            left -= 1
            if not left:
                over()

        for i in range(left):
            self._begin((*where, i), one_over)


def _shape(phases: tuple[PlanPhase, ...]) -> list[tuple[object, ...]]:
    """Return the parts of a plan."""
    return [(phase.overlap is None, *_shape(phase.then)) for phase in phases]


def _led(phase: PlanPhase, new: PlanPhase) -> PlanPhase:
    """Return *phase* on the links of *new*."""
    then = tuple(_led(part, new.then[i] if i < len(new.then) else new) for i, part in enumerate(phase.then))
    overlap = phase.overlap
    if overlap is not None:
        overlap = replace(overlap, loads=new.loads if new.overlap is None else new.overlap.loads)
    return replace(phase, loads=new.loads, then=then, overlap=overlap)


def _both(over: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls *over* when it is called for the second time."""
    left = 2

    def one() -> None:
        nonlocal left
        left -= 1
        if not left:
            over()

    return one


def after(env: simpy.Environment, delay_s: float, call: Callable[[], None]) -> None:
    """Call *call* after *delay_s*, or immediately if the delay is 0."""
    if delay_s <= 0.0:
        call()
        return
    timer = env.timeout(delay_s)
    timer.callbacks.append(lambda _: call())
