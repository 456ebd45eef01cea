"""The fluid engine: flows over shared links, in simpy's time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

import numpy as np
import simpy
from numpy.typing import NDArray

from distsim.network.sharing import max_min_rates
from distsim.network.usage import Usage

__all__ = ["Flow", "FluidEngine"]

_LAST = 2
"""simpy priority after every ordinary event of the same time (URGENT 0, NORMAL 1)."""


class Flow:
    """Transfers that move in lockstep: *progress_bytes* each, over *links* with a weight each (see `max_min_rates`).

    *cap_bytes_per_s* bounds the rate; *done* is called when the last byte has left.
    """

    __slots__ = (
        "cap_bytes_per_s",
        "done",
        "links",
        "number",
        "rate",
        "remaining_bytes",
        "shares",
        "since_s",
        "version",
        "weights",
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
        self.shares = False
        """Another flow uses one of its links, so its rate must be settled with the others'."""


class FluidEngine:
    """Keeps the rate of every flow max-min fair, and calls each flow's *done* at its time.

    Changes at one instant are settled together, once, after all of that instant's events. A flow alone on its links
    costs no settling at all.
    """

    def __init__(self, env: simpy.Environment, capacity_bytes_per_s: NDArray[np.float64]) -> None:
        self.env = env
        self.capacity = np.array(capacity_bytes_per_s, dtype=np.float64)
        self.usage = Usage(self.capacity.copy())
        self.num_settlements = 0
        self.num_flows = 0
        self._flows: dict[int, Flow] = {}
        self._sharing: dict[int, Flow] = {}
        self._owner = np.full(len(self.capacity), -1, dtype=np.int64)
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
        links = flow.links
        self.usage.enter(links, now)
        if not len(links) or int(self.usage.users[links].max()) == 1:
            self._owner[links] = flow.number
            self._set_rate(flow, self._alone(flow))
            return
        for number in np.unique(self._owner[links]).tolist():
            other = self._flows.get(number)
            if other is not None:
                self._share(other)
        self._share(flow)
        self._settle_later()

    def set_capacity(self, link: int, bytes_per_s: float) -> None:
        """Change a link's bandwidth; flows under way feel it now."""
        if self.capacity[link] == bytes_per_s:
            return
        self.capacity[link] = bytes_per_s
        if self.usage.users[link] == 1 and (owner := self._flows.get(int(self._owner[link]))) is not None:
            if not owner.shares:
                self._set_rate(owner, self._alone(owner))
                return
        if self.usage.users[link]:
            self._settle_later()

    def _alone(self, flow: Flow) -> float:
        if not len(flow.links):
            return flow.cap_bytes_per_s
        return float(min(flow.cap_bytes_per_s, (self.capacity[flow.links] / flow.weights).min()))

    def _share(self, flow: Flow) -> None:
        if not flow.shares:
            flow.shares = True
            self._sharing[flow.number] = flow

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
        for flow in list(self._sharing.values()):
            if not len(flow.links) or int(self.usage.users[flow.links].max()) == 1:
                flow.shares = False
                del self._sharing[flow.number]
                self._owner[flow.links] = flow.number
                self._set_rate(flow, self._alone(flow))
        flows = list(self._sharing.values())
        if not flows:
            return
        offsets = np.zeros(len(flows) + 1, dtype=np.int64)
        np.cumsum([len(flow.links) for flow in flows], out=offsets[1:])
        rates = max_min_rates(
            offsets,
            np.concatenate([flow.links for flow in flows]),
            np.concatenate([flow.weights for flow in flows]),
            np.array([flow.cap_bytes_per_s for flow in flows]),
            self.capacity,
        )
        for flow, rate in zip(flows, rates.tolist(), strict=True):
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

    def _finish(self, _: simpy.Event) -> None:
        now = self.env.now
        limit = now * (1.0 + 1e-14) + 1e-18
        if self._armed_s <= limit:
            self._armed_s = float("inf")
        finished: list[Flow] = []
        while self._ends and self._ends[0][0] <= limit:
            _, _, version, flow = heapq.heappop(self._ends)
            if flow.version == version:
                finished.append(flow)
        for flow in finished:
            self._account(flow)
            if flow.remaining_bytes > 0.0:
                self.usage.move(flow.links, flow.weights, flow.remaining_bytes, now, now)
            flow.version += 1
            del self._flows[flow.number]
            self.usage.leave(flow.links, now)
            if flow.shares:
                del self._sharing[flow.number]
                self._settle_later()
        for flow in finished:
            flow.done()
        self._arm()
