"""The fluid engine: flows over shared links, in simpy's time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from distsim.network.max_min import max_min_rates
from distsim.network.usage import Usage

__all__ = ["Flow", "FluidEngine", "detour"]

_LAST: Any = 2
"""simpy priority after every ordinary event of the same time (URGENT 0, NORMAL 1)."""

_FULL = 1.0 + 1e-9
"""A link is overloaded when the flows on it want more than this much of it."""


class Flow:
    """Transfers that move in lockstep: *progress_bytes* each, over *links* with a weight each (see
    `max_min_rates`).

    No link may appear twice. *cap_bytes_per_s* bounds the rate; *done* is called when the last byte has
    left.
    """

    __slots__ = (
        "cap_bytes_per_s",
        "demand",
        "done",
        "links",
        "number",
        "rate",
        "remaining_bytes",
        "shares",
        "since_s",
        "version",
        "weights",
        "wish",
    )

    def __init__(
        self,
        links: NDArray[np.int64],
        weights: NDArray[np.float64],
        progress_bytes: float,
        cap_bytes_per_s: float,
        done: Callable[[], None],
    ) -> None:
        self.links = links
        self.weights = weights
        self.remaining_bytes = progress_bytes
        self.cap_bytes_per_s = cap_bytes_per_s
        self.done = done
        self.number = -1
        self.rate = 0.0
        self.since_s = 0.0
        self.version = 0
        self.wish = 0.0
        """The rate it would have alone."""
        self.demand = weights
        """Bytes a second on each link at that rate."""
        self.shares = False
        """One of its links is overloaded, so its rate must be settled with the others'."""


class FluidEngine:
    """Keeps the rate of every flow max-min fair, and calls each flow's *done* at its time.

    A flow whose links can carry all that is wanted of them has the rate it would have alone. Only flows on
    overloaded links are settled against each other, once for each instant, after all of that instant's
    other events.
    """

    def __init__(self, env: simpy.Environment, capacity_bytes_per_s: NDArray[np.float64]) -> None:
        self.env = env
        self.capacity = np.array(capacity_bytes_per_s, dtype=np.float64)
        self.usage = Usage(self.capacity.copy())
        self.num_settlements = 0
        self.num_flows = 0
        self._wanted = np.zeros(len(self.capacity))
        self._flows: dict[int, Flow] = {}
        self._sharing: dict[int, Flow] = {}
        self._numbers = count()
        self._ends: list[tuple[float, int, int, Flow]] = []
        self._armed_s = float("inf")
        self._unsettled = False
        self._crowded: list[NDArray[np.int64]] = []

    @property
    def num_active(self) -> int:
        """Flows under way."""
        return len(self._flows)

    def start(self, flow: Flow) -> None:
        """Let *flow* begin now."""
        now = self.env.now
        flow.number = next(self._numbers)
        flow.since_s = now
        self._flows[flow.number] = flow
        self.num_flows += 1
        self.usage.enter(flow.links, now)
        self._want(flow)
        full = self._overloaded(flow.links)
        if full.any():
            self._crowded.append(flow.links[full])
            self._settle_later()
        else:
            self._set_rate(flow, flow.wish)

    def set_capacity(self, link: int, bytes_per_s: float) -> None:
        """Change a link's bandwidth; flows under way feel it now."""
        if self.capacity[link] == bytes_per_s:
            return
        self.capacity[link] = bytes_per_s
        for flow in self._flows.values():
            if link in flow.links:
                self._wanted[flow.links] -= flow.demand
                self._want(flow)
                if not flow.shares:
                    flow.shares = True
                    self._sharing[flow.number] = flow
        self._crowded.append(np.array([link]))
        self._settle_later()

    def reroute(self, instead: Mapping[int, int]) -> None:
        """Flows under way over a link of *instead* go on over the link it names."""
        for flow in list(self._flows.values()):
            self.move(flow, *detour(flow.links, flow.weights, instead))

    def move(self, flow: Flow, links: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """What is left of *flow* goes over other links from now on."""
        if np.array_equal(links, flow.links) and np.array_equal(weights, flow.weights):
            return
        now = self.env.now
        self._account(flow)
        self.usage.leave(flow.links, now)
        self._wanted[flow.links] -= flow.demand
        flow.links, flow.weights = links, weights
        self.usage.enter(links, now)
        self._want(flow)
        flow.shares = True
        self._sharing[flow.number] = flow
        self._crowded.append(links)
        self._settle_later()

    def stalled(self) -> list[int]:
        """Links without any bandwidth that a flow under way has to cross."""
        waiting = {
            link for flow in self._flows.values() for link in flow.links[self.capacity[flow.links] <= 0.0].tolist()
        }
        return sorted(waiting)

    def _want(self, flow: Flow) -> None:
        flow.wish = flow.cap_bytes_per_s
        if len(flow.links):
            flow.wish = min(flow.wish, float((self.capacity[flow.links] / flow.weights).min()))
        flow.demand = flow.weights * flow.wish
        self._wanted[flow.links] += flow.demand

    def _overloaded(self, links: NDArray[np.int64]) -> NDArray[np.bool_]:
        over: NDArray[np.bool_] = self._wanted[links] > self.capacity[links] * _FULL
        return over

    def _settle_later(self) -> None:
        if self._unsettled:
            return
        self._unsettled = True
        event = simpy.Event(self.env)
        event._ok, event._value = True, None
        event.callbacks.append(self._settle)
        self.env.schedule(event, priority=_LAST)

    def _settle(self, _: simpy.Event) -> None:
        self._unsettled = False
        self.num_settlements += 1
        self._admit()
        for flow in list(self._sharing.values()):
            if not self._overloaded(flow.links).any():
                flow.shares = False
                del self._sharing[flow.number]
                self._set_rate(flow, flow.wish)
        flows = list(self._sharing.values())
        if not flows:
            return
        offsets = np.zeros(len(flows) + 1, dtype=np.int64)
        np.cumsum([len(flow.links) for flow in flows], out=offsets[1:])
        rates = max_min_rates(
            offsets,
            np.concatenate([flow.links for flow in flows]),
            np.concatenate([flow.weights for flow in flows]),
            np.array([flow.wish for flow in flows]),
            self.capacity,
        )
        for flow, rate in zip(flows, rates.tolist(), strict=True):
            if rate != flow.rate:
                self._set_rate(flow, rate)

    def _admit(self) -> None:
        """Flows that run over links which have become overloaded now share them."""
        if not self._crowded:
            return
        crowded = np.zeros(len(self.capacity), dtype=bool)
        for links in self._crowded:
            crowded[links] = True
        self._crowded.clear()
        for number, flow in self._flows.items():
            if not flow.shares and crowded[flow.links].any():
                flow.shares = True
                self._sharing[number] = flow

    def _set_rate(self, flow: Flow, rate: float) -> None:
        self._account(flow)
        flow.rate = rate
        flow.version += 1
        if rate > 0.0:
            end_s = self.env.now + flow.remaining_bytes / rate
            heapq.heappush(self._ends, (end_s, flow.number, flow.version, flow))
            self._arm()

    def _account(self, flow: Flow) -> None:
        now = self.env.now
        if flow.rate > 0.0 and now > flow.since_s:
            moved = min(flow.rate * (now - flow.since_s), flow.remaining_bytes)
            flow.remaining_bytes -= moved
            self.usage.move(flow.links, flow.weights, moved, flow.since_s, now)
        flow.since_s = now

    def _arm(self) -> None:
        while self._ends and self._ends[0][3].version != self._ends[0][2]:
            heapq.heappop(self._ends)
        if self._ends and self._ends[0][0] < self._armed_s:
            self._armed_s = self._ends[0][0]
            timer = self.env.timeout(max(0.0, self._armed_s - self.env.now))
            timer.callbacks.append(self._finish)

    def _finish(self, _timer: simpy.Event) -> None:
        now = self.env.now
        limit = now * (1.0 + 1e-14) + 1e-18
        if self._armed_s <= limit:
            self._armed_s = float("inf")
        finished: list[Flow] = []
        while self._ends and self._ends[0][0] <= limit:
            _, _, version, flow = heapq.heappop(self._ends)
            if flow.version == version:
                finished.append(flow)
        for ended in finished:
            self._end(ended, now)
        for ended in finished:
            ended.done()
        self._arm()

    def _end(self, flow: Flow, now: float) -> None:
        self._account(flow)
        if flow.remaining_bytes > 0.0:
            self.usage.move(flow.links, flow.weights, flow.remaining_bytes, now, now)
        flow.version += 1
        del self._flows[flow.number]
        links = flow.links
        self.usage.leave(links, now)
        self._wanted[links] -= flow.demand
        self._wanted[links[self.usage.users[links] == 0]] = 0.0
        if flow.shares:
            del self._sharing[flow.number]
            self._settle_later()


def detour(
    links: NDArray[np.int64], weights: NDArray[np.float64], instead: Mapping[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """*links* with those of *instead* exchanged, weights of a link that is then used twice added up;
    the very same arrays where nothing changes."""
    led = [instead.get(link, link) for link in links.tolist()]
    if led == links.tolist():
        return links, weights
    found, place = np.unique(np.array(led, dtype=np.int64), return_inverse=True)
    return found, np.bincount(place, weights=weights).astype(np.float64)
