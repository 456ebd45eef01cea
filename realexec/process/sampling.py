"""Counts where the main thread stands while the monitor asks for it.

The position in the ring is no sample: it is written only where a thread has made no call since the last heartbeat.
"""

from __future__ import annotations

import contextlib
from collections import Counter

from distsim.debug.records import Site
from distsim.debug.records.frames import frame_of, program_frames, steps
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import Samples, write_private
from distsim.debug.rings.writer import RingWriter
from distsim.text.codec import encode

WRITTEN_EACH = 50
"""Samples after which the counts are written: a job may end before it has all."""
MOST_SITES = 20


class PositionSampler:
    """Takes one sample at each heartbeat while the header's word `W_SAMPLES` asks for more."""

    def __init__(self, ring: RingWriter, main: int) -> None:
        self._ring = ring
        self._main = main
        self._request = self._done = 0
        self._counts: Counter[Site] = Counter()

    def step(self) -> None:
        """Take a sample if one is wanted."""
        wanted = self._ring.words[rings.WORDS_AT // 8 + rings.W_SAMPLES]
        if wanted == self._done:
            return
        if wanted != self._request:
            self._request = wanted
            self._counts.clear()
        frames = program_frames(steps(frame_of(self._main)), depth=1)
        self._counts[Site(*((frames[0].file, frames[0].line, frames[0].function) if frames else ("", 0, "")))] += 1
        total = self._counts.total()
        if total >= rings.SAMPLES:
            self._done = wanted
        if total % WRITTEN_EACH == 0:
            content = Samples(wanted, total, tuple(self._counts.most_common(MOST_SITES)))
            with contextlib.suppress(OSError):
                write_private(self._ring.path.with_suffix(".samples"), encode(content).decode())
