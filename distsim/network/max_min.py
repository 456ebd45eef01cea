"""Max-min fair sharing of links among coupled flows, by progressive filling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["distinct", "max_min_rates"]

_CLOSE = 1.0 + 1e-9


def distinct(links: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Each of *links* once, in order; they are below *count*."""
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
    """The rate of each flow when all rates rise together until a link is full or a flow's cap is met.

    Flow f crosses *counts*[f] of *links*, one flow's after the other's, each with a weight: the bytes that cross the
    link for each byte of the flow's progress. A flow that meets a full link stops rising; the others go on
    (progressive filling, which is max-min fair; Bertsekas and Gallager, Data Networks, section 6.5.2).
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
    """The place in *used* of each link that is there."""
    places = np.zeros(count, dtype=np.int64)
    places[used] = np.arange(len(used))
    return places
