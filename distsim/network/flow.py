"""One flow: transfers that move in lockstep over shared links."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Flow"]


class Flow:
    """Transfers that move in lockstep: *progress_bytes* each, over *links* with a weight each (see
    `max_min_rates`).

    No link may appear twice. *cap_bytes_per_s* bounds the rate; *done* is called when the last byte has
    left. Of a link that is too narrow a flow has as many shares as *streams* it is made of.
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
        """The rate it would have alone."""
        self.demand = weights
        """Bytes a second on each link at that rate."""
        self.shares = False
        """One of its links is overloaded, so its rate must be settled with the others'."""
        self.island = 0
        """The number of these others; 0: not settled yet, or alone."""
