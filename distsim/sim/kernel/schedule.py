"""The order of what no rule orders, and the limits that end a simulation from outside."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from distsim.errors import UsageError
from distsim.text.untrusted_input import brief

# -- Schedules: in which order things happen that no rule of torch.distributed orders.
#
# A simulation is deterministic, so a race shows itself only if somebody asks for another order. A
# schedule is a few choices: ranks that are held back before one of their calls (a few long delays at
# random calls find most ordering bugs: Burckhardt et al., "A randomized scheduler with probabilistic
# guarantees of finding bugs", ASPLOS 2010, PCT), whether sends wait for their receiver, and which of
# several waiting senders a receive from any source takes. As text it replays bit for bit.

_DELAY = re.compile(r"rank(\d+)@(\d+)\+(\d*\.?\d+(?:e[+-]?\d+)?)s")


@dataclass(frozen=True, slots=True, order=True)
class CallDelay:
    """Delay of *rank* by *seconds* of virtual time before its call number *call* (from 0)."""

    rank: int
    call: int
    seconds: float

    def __str__(self) -> str:
        return f"rank{self.rank}@{self.call}+{self.seconds:g}s"


@dataclass(slots=True)
class Schedule:
    """One interleaving. Without any choice it is the ordinary run."""

    delays: tuple[CallDelay, ...] = ()
    buffered: bool = False
    """Whether a send ends at once, as small ones do on NCCL and MPI.

    Otherwise it ends when its receiver has arrived, as on gloo.
    """
    any_source: int | None = None
    """Seed of the choice among several senders; None for the first that arrived."""
    _by_place: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False)
    _random: random.Random = field(default_factory=random.Random, init=False, repr=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the schedule before a run."""
        self._by_place = {(d.rank, d.call): d.seconds for d in self.delays}
        self._random = random.Random(self.any_source)

    @classmethod
    def draw(cls, seed: int, calls: Sequence[int], long_s: float) -> Schedule:
        """Return a random schedule for ranks that made *calls* calls each in the undelayed run.

        Every third schedule gives each rank a random delay before every call. The others follow PCT: the ranks start
        in a random order of priorities, and one to three of them are delayed by *long_s* later.
        """
        draw = random.Random(seed)
        delays: dict[tuple[int, int], float] = {}
        if seed % 3 == 0:
            for rank, number in enumerate(calls):
                for call in range(number):
                    if draw.random() < 0.5:
                        delays[rank, call] = long_s * draw.random()
        else:
            order = list(range(len(calls)))
            draw.shuffle(order)
            delays.update({(rank, 1): long_s * position for position, rank in enumerate(order) if position})
            for _ in range(draw.randint(1, 3)):
                rank = draw.randrange(len(calls))
                delays[rank, draw.randrange(max(1, calls[rank]))] = long_s * (len(calls) + draw.randint(1, 3))
        chosen = tuple(CallDelay(rank, call, float(f"{s:.3g}")) for (rank, call), s in sorted(delays.items()))
        return cls(chosen, buffered=draw.random() < 0.5, any_source=seed if draw.random() < 0.5 else None)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Return the inverse of `str`."""
        delays: list[CallDelay] = []
        buffered, any_source = False, None
        for part in filter(None, text.split(",")):
            match = _DELAY.fullmatch(part.strip()) if len(part) < 200 else None
            if match is not None:
                delays.append(CallDelay(int(match[1]), int(match[2]), float(match[3])))
            elif part.strip() == "buffered":
                buffered = True
            elif re.fullmatch(r"\s*any=\d{1,18}\s*", part):
                any_source = int(part.split("=")[1])
            elif part.strip() != "ordinary":
                raise UsageError(
                    f"expected a schedule as `distsim scenario run --explore` prints it "
                    f"(rank2@5+0.1s,buffered,any=7), got {brief(part.strip())!r}"
                )
        return cls(tuple(delays), buffered, any_source)

    def __str__(self) -> str:
        parts = [str(d) for d in self.delays]
        if self.buffered:
            parts.append("buffered")
        if self.any_source is not None:
            parts.append(f"any={self.any_source}")
        return ",".join(parts) or "ordinary"

    # -- what the simulator asks

    def delay_s(self, rank: int, call: int) -> float:
        """Return how long *rank* is held back before its call number *call*."""
        return self._by_place.get((rank, call), 0.0)

    def choose(self, num: int) -> int:
        """Return which of *num* senders, in the order of their arrival, is matched."""
        return 0 if self.any_source is None or num < 2 else self._random.randrange(num)


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
