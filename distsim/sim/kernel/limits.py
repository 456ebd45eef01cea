"""Limits that end a simulation from outside."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

_real_monotonic = time.monotonic


@dataclass(slots=True)
class Limits:
    """Limits after which a run is ended; None means no limit."""

    virtual_time_s: float | None = None
    wall_time_s: float | None = None
    events: int | None = None
    reached: str | None = None
    """Sentence about the limit that ended the run; None if none did."""
    name: str | None = None
    """Name of that limit."""
    _started_s: float = field(default_factory=_real_monotonic)

    _last: tuple[float, str] | None = None

    def end_within(self, wall_s: float, why: str) -> None:
        """End the run after at most this time, and report *why* as the reason."""
        self._last = _real_monotonic() + wall_s, why

    def start(self) -> None:
        """Start measuring."""
        self._started_s = _real_monotonic()
        self.reached = self.name = None

    def end(self, name: str) -> None:
        """Record that the limit *name* ends the run."""
        value = getattr(self, name)
        unit = {"virtual_time_s": " s of virtual time", "wall_time_s": " s of wall time", "events": " events"}[name]
        self.name = name
        self.reached = f"the program still ran after {value:{',' if name == 'events' else 'g'}}{unit}"

    def over(self, now_s: float, events: int) -> bool:
        """Return whether the run must end. This is cheap enough to be called at every event."""
        if self.virtual_time_s is not None and now_s > self.virtual_time_s:
            self.end("virtual_time_s")
        elif self.events is not None and events > self.events:
            self.end("events")
        elif not events & 63 and self.wall_over():
            pass
        return self.reached is not None

    def wall_over(self) -> bool:
        """Return whether the limit of wall time is reached."""
        if self._last is not None and _real_monotonic() > self._last[0]:
            self.name, self.reached = "wall_time_s", self._last[1]
        elif self.wall_time_s is not None and _real_monotonic() - self._started_s > self.wall_time_s:
            self.end("wall_time_s")
        return self.reached is not None
