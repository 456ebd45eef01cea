"""When a monitor did not run itself: it was stopped with its container, or its host was suspended.

Its own work may take long (hundreds of ranks, another host that is slow to answer), and is no absence: so a thread
beside it naps and looks at the clock, whatever the monitor does meanwhile. Only when neither has run was it away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Away"]

NAP_S = 0.1
AWAY_S = 1.0
"""Between two looks at the clock, beyond the nap."""
MOST_ABSENCES = 64


class Away:
    """Times at which nobody watched; *clock* in nanoseconds (monotonic)."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.spans_ns: list[tuple[int, int]] = []
        """From, to; the last of them."""
        self.times = 0
        self._clock = clock
        self._last_ns = clock()
        self._lock = threading.Lock()
        self._over = threading.Event()

    def look(self) -> int:
        """How often the monitor has been away so far."""
        with self._lock:
            now_ns = self._clock()
            if now_ns - self._last_ns > (NAP_S + AWAY_S) * 1e9:
                self.times += 1
                self.spans_ns.append((self._last_ns, now_ns))
                del self.spans_ns[:-MOST_ABSENCES]
            self._last_ns = now_ns
            return self.times

    def __enter__(self) -> None:
        """Look from now on, ten times a second."""
        self._last_ns = self._clock()
        threading.Thread(target=self._nap, name="distsim-away", daemon=True).start()

    def __exit__(self, *exception: object) -> None:
        """Look no more; the thread ends."""
        self._over.set()

    def _nap(self) -> None:
        while not self._over.wait(NAP_S):
            self.look()
