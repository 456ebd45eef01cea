"""Which flows share links that cannot carry all that is wanted of them, and the rates these get.

A link is overloaded where the flows on it, each at the rate it would have alone, want more than it has. Only
overloaded links bound anybody, so only flows over one are settled against each other. Flows that share overloaded
links, directly or through others, are an island: what begins or ends on one changes no rate on another, so it costs
one island's settlement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from distsim.network.flow import Flow
from distsim.network.max_min import distinct, max_min_rates

__all__ = ["Sharing"]

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
        """A flow begins; whether it has to be settled (else it has the rate it would have alone)."""
        links = flow.links
        self._want(flow)
        # A link that was overloaded and is to be settled in this instant may be so again before it is.
        if not ((self._wanted[links] > self.capacity[links] * _FULL) | self._over[links]).any():
            return False
        self._enter(flow)
        return True

    def remove(self, flow: Flow) -> bool:
        """A flow has ended; whether others have to be settled."""
        links = flow.links
        self._wanted[links] -= flow.demand
        self._wanted[links[self._users[links] == 0]] = 0.0
        if not flow.shares:
            return False
        self._leave(flow)
        return True

    def move(self, flow: Flow, links: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """A flow goes over other links from now on."""
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
        """Those out of *flows* (all that are under way) whose rate may have changed, and their rates."""
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
        """Into the island of its overloaded *links*; those that it connects are one from now on."""
        found = self._island_of[links]
        found = found[found > 0]
        others: list[int] = []
        if not len(found):
            self._last = home = self._last + 1
            self._islands[home] = {}
        else:
            home = int(found.min())
            if found.max() != home:
                _, *others = np.unique(found).tolist()
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
