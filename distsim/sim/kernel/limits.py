"""When a simulation is ended from outside: so much virtual time, so much wall time, so many events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["Limits"]

_real_monotonic = time.monotonic


@dataclass(slots=True)
class Limits:
    """A program that never ends is ended by these; None: no such limit."""

    virtual_time_s: float | None = None
    wall_time_s: float | None = None
    events: int | None = None
    reached: str | None = None
    """What ended the run, as a sentence."""
    name: str | None = None
    """Which limit that was."""
    _started_s: float = field(default_factory=_real_monotonic)

    _last: tuple[float, str] | None = None

    def end_within(self, wall_s: float, why: str) -> None:
        """Let the run go on for so long, at most; *why* is what is reported then."""
        self._last = _real_monotonic() + wall_s, why

    def start(self) -> None:
        """The run begins now."""
        self._started_s = _real_monotonic()
        self.reached = self.name = None

    def end(self, name: str) -> None:
        """The run ends by this limit."""
        value = getattr(self, name)
        what = {"virtual_time_s": " s of virtual time", "wall_time_s": " s of wall time", "events": " events"}[name]
        self.name = name
        self.reached = f"the program still ran after {value:{',' if name == 'events' else 'g'}}{what}"

    def over(self, now_s: float, events: int) -> bool:
        """Whether the run has to end; cheap enough for every event."""
        if self.virtual_time_s is not None and now_s > self.virtual_time_s:
            self.end("virtual_time_s")
        elif self.events is not None and events > self.events:
            self.end("events")
        elif not events & 63 and self.wall_over():
            pass
        return self.reached is not None

    def wall_over(self) -> bool:
        """Whether the wall time is used up."""
        if self._last is not None and _real_monotonic() > self._last[0]:
            self.name, self.reached = "wall_time_s", self._last[1]
        elif self.wall_time_s is not None and _real_monotonic() - self._started_s > self.wall_time_s:
            self.end("wall_time_s")
        return self.reached is not None
