"""The fluid engine: flows over shared links, in simpy's time."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from distsim.network.flow import Flow
from distsim.network.sharing import Sharing
from distsim.network.usage import Usage

__all__ = ["FluidEngine", "detour"]

_LAST: Any = 2
"""simpy priority after every ordinary event of the same time (URGENT 0, NORMAL 1)."""


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
        self._sharing = Sharing(self.capacity, self.usage.users)
        self._flows: dict[int, Flow] = {}
        self._numbers = count()
        self._ends: list[tuple[float, int, int, Flow]] = []
        self._armed_s = float("inf")
        self._unsettled = False

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
        self.usage.add_flow(flow.links, now)
        if self._sharing.add(flow):
            self._settle_later()
        else:
            self._set_rate(flow, flow.wish)

    def set_capacity(self, link: int, bytes_per_s: float) -> None:
        """Change a link's bandwidth; flows under way feel it now."""
        if self.capacity[link] == bytes_per_s:
            return
        self.capacity[link] = bytes_per_s
        self._sharing.on_capacity_changed([flow for flow in self._flows.values() if link in flow.links])
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
        self.usage.remove_flow(flow.links, now)
        self.usage.add_flow(links, now)
        self._sharing.move(flow, links, weights)
        self._settle_later()

    def stalled(self) -> list[int]:
        """Links without any bandwidth that a flow under way has to cross."""
        waiting = {
            link for flow in self._flows.values() for link in flow.links[self.capacity[flow.links] <= 0.0].tolist()
        }
        return sorted(waiting)

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
        for flow, rate in self._sharing.settle(self._flows.values()):
            if rate != flow.rate:
                self._set_rate(flow, rate)

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
        self.usage.remove_flow(flow.links, now)
        if self._sharing.remove(flow):
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
