"""Who is active: since when each rank of a host shows no sign of progress, and when the monitor did not run itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from distsim.debug.evidence.procfs import Work, work_of
from distsim.debug.rings.reader import RingReader

__all__ = ["SAMPLE_S", "ActivityWatch", "SuspensionDetector"]

SAMPLE_S = 1.0
"""Between two looks at a rank that makes no calls."""
WORKS = 0.03
"""Share of one core from which on a process tree works. A rank that stands still needs less for its heartbeat."""

NAP_S = 0.1
AWAY_S = 1.0
"""Between two looks at the clock, beyond the nap."""
MOST_ABSENCES = 64


@dataclass(frozen=True)
class _Sample:
    taken_ns: int
    count: int
    position: object
    """Where the main thread stands, as its heartbeat wrote it."""
    work: Work | None
    """None: it had made calls since the sample before, so nobody looked."""
    idle_since_ns: int
    asleep_since_ns: int
    """Since then the main thread has used no CPU time, whatever its other threads and child processes did."""


class ActivityWatch:
    """Samples every rank once a second."""

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}

    def step(self, readers: Mapping[int, RingReader]) -> None:
        """Sample the ranks whose last sample is old enough."""
        now_ns = time.monotonic_ns()
        for rank, reader in readers.items():
            before = self._samples.get(rank)
            if before is not None and now_ns - before.taken_ns < SAMPLE_S * 1e9:
                continue
            work = None if before is None or before.count != reader.count else work_of(reader.header.pid)
            after = _Sample(now_ns, reader.count, reader.position(), work, now_ns, now_ns)
            if before is not None and not _main_active(before, after):
                after = replace(after, asleep_since_ns=before.asleep_since_ns)
                if not _works(before, after):
                    after = replace(after, idle_since_ns=before.idle_since_ns)
            self._samples[rank] = after

    def pass_over(self, readers: Mapping[int, RingReader]) -> None:
        """Take what the ranks have just done for this monitor (they wrote their stacks) for no progress."""
        for rank, reader in readers.items():
            sample = self._samples.get(rank)
            if sample is not None and sample.work is not None:
                self._samples[rank] = replace(sample, work=work_of(reader.header.pid))

    def idle_since_ns(self) -> dict[int, int]:
        """Rank -> since when (monotonic) it has been idle."""
        return {rank: sample.idle_since_ns for rank, sample in self._samples.items()}

    def asleep_since_ns(self) -> dict[int, int]:
        """Rank -> since when (monotonic) its main thread has slept."""
        return {rank: sample.asleep_since_ns for rank, sample in self._samples.items()}

    def forget(self) -> None:
        """Drop the samples of an attempt that is over."""
        self._samples.clear()


def _main_active(before: _Sample, after: _Sample) -> bool:
    if before.count != after.count or before.position != after.position or before.work is None or after.work is None:
        return True
    return after.work.main_cpu_s - before.work.main_cpu_s > WORKS * (after.taken_ns - before.taken_ns) / 1e9


def _works(before: _Sample, after: _Sample) -> bool:
    """Whether any thread or child process has computed, read or written between two samples."""
    assert before.work is not None
    assert after.work is not None
    # A process that ends takes its CPU time out of the sum: less than before is a change, too.
    cpu_s = abs(after.work.cpu_s - before.work.cpu_s)
    span_s = (after.taken_ns - before.taken_ns) / 1e9
    return cpu_s > WORKS * span_s or before.work.transferred != after.work.transferred


class SuspensionDetector:
    """Times at which nobody watched: the monitor was stopped with its container, or its host was suspended.

    Its own work may take long (hundreds of ranks, another host that is slow to answer), and is no absence: so a thread
    beside it naps and looks at the clock, whatever the monitor does meanwhile. Only when neither has run was it away.
    *clock* is in nanoseconds (monotonic).
    """

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
