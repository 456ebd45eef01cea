"""Finds where a slow rank stands more often than the others.

Nothing is sampled before a rank is slow. Then the heartbeats of this host's ranks sample their main threads for half a
minute (`SAMPLES`), which costs each 0.06% of a core.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from distsim.debug.diagnosis.pace.job import PaceNote
from distsim.debug.records import Site
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import Samples
from distsim.debug.rings.reader import RingReader
from distsim.text.codec import read

FEWEST = 100
"""Samples of each rank below which nothing is said."""
SURPLUS = 0.06
"""Smallest difference of two shares of samples that is worth a word: noise of 240 samples is 3 points."""
MOST_WAIT_S = 60.0
"""Seconds after which the samples that are there have to do."""


@dataclass(frozen=True)
class _Search:
    rank: int
    request: int
    began_s: float
    delays_ns: Mapping[int, int]
    """Time that each rank's main thread has waited for a core."""


class CauseSearch:
    """The search for the cause of one slow rank after the other."""

    def __init__(self) -> None:
        self._search: _Search | None = None
        self._waiting: list[int] = []
        self._request = 0

    def begin(self, rank: int) -> None:
        """Look for the cause of *rank*, after those that are being looked for."""
        if rank not in self._waiting and (self._search is None or self._search.rank != rank):
            self._waiting.append(rank)

    def step(self, readers: Sequence[RingReader], is_last: bool = False) -> list[PaceNote]:
        """Ask for samples, or return the causes that they show.

        Args:
            readers: The rings of this host's ranks.
            is_last: Whether the ranks have ended, so that no more samples come.
        """
        search = self._search
        if search is None:
            if self._waiting and not is_last and len(readers) > 1:
                self._request += 1
                self._search = _Search(self._waiting.pop(0), self._request, time.monotonic(), _delays_ns(readers))
                for reader in readers:
                    _ask(reader.path, self._request)
            return []
        elapsed_s = time.monotonic() - search.began_s
        samples = {reader.number: _samples(reader.path, search.request) for reader in readers}
        if not is_last and elapsed_s < MOST_WAIT_S and any(one.total < rings.SAMPLES for one in samples.values()):
            return []
        self._search = None
        causes = [] if min(one.total for one in samples.values()) < FEWEST else positions_text(search.rank, samples)
        delays = {
            rank: (delay_ns - search.delays_ns[rank]) / 1e9 / elapsed_s
            for rank, delay_ns in _delays_ns(readers).items()
            if rank in search.delays_ns
        }
        return [
            PaceNote("slow_cause", f"rank {search.rank} {cause}", {"rank": search.rank})
            for cause in (*causes, *core_text(search.rank, delays))
        ]


def positions_text(rank: int, samples: Mapping[int, Samples]) -> list[str]:
    """Return where *rank* stands more often than the others: `next_batch data.py:41, 9% of samples, others 0%`."""
    if rank not in samples or len(samples) < 2:
        return []
    shares = {number: {site: count / one.total for site, count in one.sites} for number, one in samples.items()}
    surplus: list[tuple[float, float, float, Site]] = []
    for site, share in shares[rank].items():
        others = median(shares[number].get(site, 0.0) for number in shares if number != rank)
        if site.file and share - others >= SURPLUS:
            surplus.append((share - others, share, others, site))
    surplus.sort(key=lambda one: -one[0])
    return [
        f"stands more often in {site.function} at {site}: {share:.0%} of samples, others {others:.0%}"
        for _, share, others, site in surplus[:2]
    ]


def core_text(rank: int, delays: Mapping[int, float]) -> list[str]:
    """Return whether *rank* waits for a core more than the others do, by the share of time that each waits."""
    others = [share for number, share in delays.items() if number != rank]
    if rank not in delays or not others or delays[rank] - median(others) < SURPLUS:
        return []
    return [f"waits for a core {delays[rank]:.0%} of the time, others {median(others):.0%}"]


def _ask(path: Path, request: int) -> None:
    """Write the number of the request into a ring's header; another user's ring cannot be asked."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, request.to_bytes(8, "little"), rings.WORDS_AT + 8 * rings.W_SAMPLES)
        finally:
            os.close(descriptor)


def _samples(path: Path, request: int) -> Samples:
    with contextlib.suppress(OSError, ValueError):
        samples = read(path.with_suffix(".samples"), Samples)
        if samples.request == request:
            return samples
    return Samples(request, 0, ())


def _delays_ns(readers: Sequence[RingReader]) -> dict[int, int]:
    """Return how long the main thread of each rank has been ready to run without a core (/proc/PID/schedstat)."""
    delays = {}
    for reader in readers:
        with contextlib.suppress(OSError, ValueError, IndexError):
            delays[reader.number] = int(Path(f"/proc/{reader.header.pid}/schedstat").read_text().split()[1])
    return delays
