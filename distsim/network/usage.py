"""Requests and results of the network, and the traffic of each link over time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distsim.collectives.plan import Transfer

__all__ = ["LinkBusy", "Statistics", "Timing", "Transfer", "Usage"]


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


_MAX_CELLS = 400_000
_MAX_BINS = 128
_MIN_BINS = 16
_FIRST_BIN_S = 1e-6
_MAX_UNBINNED = 64
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
        if len(self._unbinned) > _MAX_UNBINNED:
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
