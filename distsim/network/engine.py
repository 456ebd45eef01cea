"""The fluid engine: flows over shared links, their max-min fair rates, and the traffic of each link."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

# -- The traffic of each link over time.

_MAX_CELLS = 400_000
_MAX_BINS = 128
_MIN_BINS = 16
_FIRST_BIN_S = 1e-6
MAX_UNBINNED = 64
"""Number of transfers kept unbinned, because binning takes longer than a short run."""


class Usage:
    """Bytes and busy time of every link, and bytes in bins of time.

    The bins double in width when the run outgrows them, so their number never grows: a link has at most
    128 samples (fewer on clusters of very many links).
    """

    def __init__(self, capacity: NDArray[np.float64]) -> None:
        count = len(capacity)
        self._capacity = capacity
        self.bytes = np.zeros(count)
        self.busy_s = np.zeros(count)
        self.users = np.zeros(count, dtype=np.int32)
        self._busy_since = np.zeros(count)
        bins = max(_MIN_BINS, min(_MAX_BINS, _MAX_CELLS // max(count, 1)))
        self._bins = bins - bins % 2
        self._width_s = _FIRST_BIN_S
        self._cells: NDArray[np.float32] | None = None
        self._unbinned: list[tuple[NDArray[np.int64], NDArray[np.float64], float, float]] = []
        """(links, bytes over each, start, end) of transfers that are not in bins yet."""

    def add_flow(self, links: NDArray[np.int64], now_s: float) -> None:
        """Count a flow on *links*, which contain no link twice."""
        before = self.users[links]
        self._busy_since[links[before == 0]] = now_s
        self.users[links] = before + 1

    def remove_flow(self, links: NDArray[np.int64], now_s: float) -> None:
        """Stop counting a flow on *links*."""
        after = self.users[links] - 1
        self.users[links] = after
        idle = links[after == 0]
        self.busy_s[idle] += now_s - self._busy_since[idle]

    def move(
        self,
        links: NDArray[np.int64],
        weights: NDArray[np.float64],
        progress: float,
        since_s: float,
        now_s: float,
    ) -> None:
        """Count *progress* bytes of a flow, spread evenly between the two times."""
        if progress <= 0.0:
            return
        moved = weights * progress
        self.bytes[links] += moved
        self._unbinned.append((links, moved, since_s, now_s))
        if len(self._unbinned) > MAX_UNBINNED:
            self._bin_all()

    def _bin_all(self) -> None:
        unbinned, self._unbinned = self._unbinned, []
        for entry in unbinned:
            self._bin(*entry)

    def _bin(self, links: NDArray[np.int64], moved: NDArray[np.float64], since_s: float, now_s: float) -> None:
        while now_s >= self._bins * self._width_s:
            self._halve()
        if self._cells is None:
            self._cells = np.zeros((self._bins, len(self.bytes)), dtype=np.float32)
        first, last = int(since_s / self._width_s), int(now_s / self._width_s)
        if first == last or now_s <= since_s:
            self._cells[first, links] += moved
            return
        edges = np.clip(np.arange(first, last + 2) * self._width_s, since_s, now_s)
        shares = np.diff(edges) / (now_s - since_s)
        self._cells[first : last + 1, links] += shares[:, None] * moved

    def _halve(self) -> None:
        self._width_s *= 2
        if self._cells is not None:
            half = self._bins // 2
            self._cells[:half] = self._cells[0::2] + self._cells[1::2]
            self._cells[half:] = 0

    def busy_until(self, now_s: float) -> NDArray[np.float64]:
        """Return the busy seconds of every link up to now, including links that are still busy."""
        return self.busy_s + np.where(self.users > 0, now_s - self._busy_since, 0.0)

    def peaks(self, links: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the highest utilisation of each of *links* in any bin."""
        if self._cells is None:
            return np.zeros(len(links))
        peaks: NDArray[np.float64] = self._cells[:, links].max(axis=0) / (self._capacity[links] * self._width_s)
        return peaks

    def fractions(self) -> tuple[float, NDArray[np.float64]]:
        """Return the width of a bin in seconds, and the utilisation of every link in every bin (bins by links)."""
        self._bin_all()
        if self._cells is None:
            return self._width_s, np.zeros((0, len(self.bytes)))
        used = np.flatnonzero(self._cells.any(axis=1))
        cells = self._cells[: int(used[-1]) + 1] if len(used) else self._cells[:0]
        return self._width_s, cells / (self._capacity * self._width_s)


# -- Flows and their rates.


class Flow:
    """A group of transfers that progress together, by *progress_bytes* each, over *links* with a weight each (see
    `max_min_rates`).

    No link may appear twice. *cap_bytes_per_s* limits the rate, and *done* is called when the last byte has left. On
    a congested link, the flow gets *streams* fair shares.
    """

    __slots__ = (
        "cap_bytes_per_s",
        "demand",
        "done",
        "island",
        "links",
        "number",
        "rate",
        "remaining_bytes",
        "shares",
        "since_s",
        "streams",
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
        streams: float = 1.0,
    ) -> None:
        self.links = links
        self.weights = weights
        self.remaining_bytes = progress_bytes
        self.cap_bytes_per_s = cap_bytes_per_s
        self.done = done
        self.streams = streams
        self.number = -1
        self.rate = 0.0
        self.since_s = 0.0
        self.version = 0
        self.wish = 0.0
        """The rate that the flow would have on otherwise idle links."""
        self.demand = weights
        """Bytes a second on each link at that rate."""
        self.shares = False
        """Whether one of its links is overloaded, so that its rate depends on other flows."""
        self.island = 0
        """The number of these others; 0: not settled yet, or alone."""


# -- Max-min fair sharing of links among coupled flows, by progressive filling.

_CLOSE = 1.0 + 1e-9


def distinct(links: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the distinct values of *links* in order; all are below *count*."""
    if 16 * len(links) < count:
        return np.unique(links)
    there = np.zeros(count, dtype=bool)
    there[links] = True
    return np.flatnonzero(there)


def max_min_rates(
    counts: Sequence[int],
    links: NDArray[np.int64],
    weights: NDArray[np.float64],
    caps: NDArray[np.float64],
    capacity: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the max-min fair rate of each flow: all rates rise together until a link is full or a flow's cap is
    reached.

    Flow f crosses *counts*[f] of *links*, whose entries are concatenated flow by flow. The weight of an entry is the
    number of bytes that cross the link for each byte of the flow's progress. A flow that meets a full link stops
    rising, and the others continue.

    Source: progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2).
    """
    num_flows = len(caps)
    rates = np.zeros(num_flows)
    rows = np.repeat(np.arange(num_flows), counts)
    used = distinct(links, len(capacity))
    entries = np.searchsorted(used, links) if 16 * len(links) < len(capacity) else _places(used, len(capacity))[links]
    room = capacity[used].astype(np.float64, copy=True)
    num_links = len(used)
    rising = np.ones(num_flows, dtype=bool)
    live_rows, live_links, live_weights = rows, entries, weights
    while rising.any():
        load = np.bincount(live_links, live_weights, minlength=num_links)
        with np.errstate(divide="ignore", invalid="ignore"):
            level = np.where(load > 0.0, room / load, np.inf)
        lowest = float(min(level.min(initial=np.inf), caps[rising].min()))
        if lowest == np.inf:
            rates[rising] = np.inf
            break
        lowest = max(lowest, 0.0)
        stopped = np.zeros(num_flows, dtype=bool)
        stopped[live_rows[(level <= lowest * _CLOSE)[live_links]]] = True
        stopped |= rising & (caps <= lowest * _CLOSE)
        rates[stopped] = np.minimum(lowest, caps[stopped])
        rising &= ~stopped
        leaves = stopped[live_rows]
        gone = rates[live_rows[leaves]] * live_weights[leaves]
        room -= np.bincount(live_links[leaves], gone, minlength=num_links)
        stays = ~leaves
        live_rows, live_links, live_weights = live_rows[stays], live_links[stays], live_weights[stays]
    return rates


def _places(used: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the position of each link in *used*."""
    places = np.zeros(count, dtype=np.int64)
    places[used] = np.arange(len(used))
    return places


# -- Which flows share links that cannot carry all that is wanted of them, and the rates these get.
#
# A link is overloaded where the flows on it, each at the rate it would have alone, want more than it has. Only
# overloaded links bound anybody, so only flows over one are settled against each other. Flows that share overloaded
# links, directly or through others, are an island: what begins or ends on one changes no rate on another, so it costs
# one island's settlement.

_FULL = 1.0 + 1e-9
"""A link is overloaded when the flows on it want more than this much of it."""


class Sharing:
    """Flows under way on links of *capacity* bytes a second each, by *users*: how many flows each link has."""

    def __init__(self, capacity: NDArray[np.float64], users: NDArray[np.int32]) -> None:
        self.capacity = capacity
        self._users = users
        self._wanted = np.zeros(len(capacity))
        self._over = np.zeros(len(capacity), dtype=bool)
        """Overloaded, as of the last settlement."""
        self._island_of = np.zeros(len(capacity), dtype=np.int64)
        """The island of each overloaded link; 0: it is not."""
        self._islands: dict[int, dict[int, Flow]] = {}
        self._last = 0
        self._changed: list[NDArray[np.int64]] = []
        """Links of which more or less is wanted since the last settlement."""
        self._entering: dict[int, Flow] = {}
        """Flows that share from the next settlement on, unless their links can carry them."""

    def add(self, flow: Flow) -> bool:
        """Add a flow.

        Return whether rates have to be settled; otherwise the flow gets the rate that it would have alone.
        """
        links = flow.links
        self._want(flow)
        # A link that was overloaded and is to be settled in this instant may be so again before it is.
        if not ((self._wanted[links] > self.capacity[links] * _FULL) | self._over[links]).any():
            return False
        self._enter(flow)
        return True

    def remove(self, flow: Flow) -> bool:
        """Return whether a flow has ended; whether others have to be settled."""
        links = flow.links
        self._wanted[links] -= flow.demand
        self._wanted[links[self._users[links] == 0]] = 0.0
        if not flow.shares:
            return False
        self._leave(flow)
        return True

    def move(self, flow: Flow, links: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Move a flow to other links."""
        self._wanted[flow.links] -= flow.demand
        if flow.shares:
            self._leave(flow)
        flow.links, flow.weights = links, weights
        self._want(flow)
        self._enter(flow)

    def on_capacity_changed(self, flows: Iterable[Flow]) -> None:
        """Recompute the shares of *flows*, which cross a link whose capacity has changed."""
        for flow in flows:
            self._wanted[flow.links] -= flow.demand
            if flow.shares:
                self._leave(flow)
            self._want(flow)
            self._enter(flow)

    def settle(self, flows: Iterable[Flow]) -> Iterator[tuple[Flow, float]]:
        """Return the flows out of *flows* whose rate may have changed, and their rates."""
        if not self._changed:
            return
        changed = distinct(np.concatenate(self._changed), len(self.capacity))
        self._changed.clear()
        before, now = self._over[changed], self._wanted[changed] > self.capacity[changed] * _FULL
        self._over[changed] = now
        unsettled = self._entering
        self._entering = {}
        islands = set(self._island_of[changed].tolist())
        if (now & ~before).any():  # flows that have crossed these links all the while share them now
            newly = np.zeros(len(self.capacity), dtype=bool)
            newly[changed[now & ~before]] = True
            for flow in flows:
                if newly[flow.links].any():
                    islands.add(flow.island)
                    unsettled[flow.number] = flow
        for island in islands - {0}:
            members = self._islands.pop(island)
            for flow in members.values():
                self._island_of[flow.links] = 0
            unsettled |= members
        self._island_of[changed] = 0
        bound: dict[int, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        for number, flow in sorted(unsettled.items()):
            over = self._over[flow.links]
            if over.any():
                flow.shares = True
                bound[number] = flow.links[over], flow.weights[over] * flow.streams
                self._place(flow, bound[number][0])
            else:
                flow.shares, flow.island = False, 0
                yield flow, flow.wish
        for island in sorted({unsettled[number].island for number in bound}):
            members = self._islands[island]
            entries = [bound[number] for number in members]
            # Rates of a stream rise together, so each flow is reckoned by one of its streams.
            streams = np.array([flow.streams for flow in members.values()])
            rates = max_min_rates([len(links) for links, _ in entries], np.concatenate([links for links, _ in entries]),
                np.concatenate([weights for _, weights in entries]),
                np.array([flow.wish for flow in members.values()]) / streams,
                self.capacity)  # fmt: skip
            yield from zip(members.values(), (rates * streams).tolist(), strict=True)

    def _place(self, flow: Flow, links: NDArray[np.int64]) -> None:
        """Put a flow into the island of its overloaded *links*. Islands that these links connect are merged."""
        islands = self._island_of[links]
        islands = islands[islands > 0]
        others: list[int] = []
        if not len(islands):
            self._last = home = self._last + 1
            self._islands[home] = {}
        else:
            home = int(islands.min())
            if islands.max() != home:
                _, *others = np.unique(islands).tolist()
        members = self._islands[home]
        for other in others:
            for one in self._islands.pop(other).values():
                one.island = home
                members[one.number] = one
                of_it = self._island_of[one.links]
                self._island_of[one.links[of_it == other]] = home
        flow.island = home
        members[flow.number] = flow
        self._island_of[links] = home

    def _want(self, flow: Flow) -> None:
        flow.wish = flow.cap_bytes_per_s
        if len(flow.links):
            flow.wish = min(flow.wish, float((self.capacity[flow.links] / flow.weights).min()))
        flow.demand = flow.weights * flow.wish
        self._wanted[flow.links] += flow.demand

    def _enter(self, flow: Flow) -> None:
        flow.shares = True
        self._entering[flow.number] = flow
        self._changed.append(flow.links)

    def _leave(self, flow: Flow) -> None:
        self._entering.pop(flow.number, None)
        if flow.island:
            del self._islands[flow.island][flow.number]
            flow.island = 0
        flow.shares = False
        self._changed.append(flow.links)


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
        """Return the number of active flows."""
        return len(self._flows)

    def start(self, flow: Flow) -> None:
        """Start *flow* now."""
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
        """Change a link's bandwidth. Active flows are affected at once."""
        if self.capacity[link] == bytes_per_s:
            return
        self.capacity[link] = bytes_per_s
        self._sharing.on_capacity_changed([flow for flow in self._flows.values() if link in flow.links])
        self._settle_later()

    def reroute(self, instead: Mapping[int, int]) -> None:
        """Move flows from each link that is a key of *instead* to the link that is its value."""
        for flow in list(self._flows.values()):
            self.move(flow, *detour(flow.links, flow.weights, instead))

    def move(self, flow: Flow, links: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Move the rest of *flow* to other links from now on."""
        if np.array_equal(links, flow.links) and np.array_equal(weights, flow.weights):
            return
        now = self.env.now
        self._account(flow)
        self.usage.remove_flow(flow.links, now)
        self.usage.add_flow(links, now)
        self._sharing.move(flow, links, weights)
        self._settle_later()

    def stalled(self) -> list[int]:
        """Return links without any bandwidth that a flow under way has to cross."""
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
    """Return *links* with replacements from *instead*, and the weights; the weights of a link that is then used
    twice are added.

    If nothing is replaced, the same arrays are returned.
    """
    led = [instead.get(link, link) for link in links.tolist()]
    if led == links.tolist():
        return links, weights
    link_ids, inverse = np.unique(np.array(led, dtype=np.int64), return_inverse=True)
    return link_ids, np.bincount(inverse, weights=weights).astype(np.float64)
