"""Tracks on which slices never overlap: Perfetto draws two overlapping slices of one track as nonsense."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Tracks"]

ROUNDING_S = 5e-10
"""Sums of floats end a hair after the next slice begins; the trace is written in nanoseconds."""


class Tracks:
    """Numbers tracks from *first*: one for each label, more where slices of one label overlap."""

    def __init__(self, first: int = 1) -> None:
        self._first = first
        self._free_from_s: list[float] = []
        self._labels: list[str] = []
        self._of_label: dict[str, list[int]] = {}

    def place(self, label: str, start_s: float, end_s: float) -> int:
        """The track for a slice; slices of a label must come in the order of their starts."""
        for track in self._of_label.setdefault(label, []):
            if self._free_from_s[track] <= start_s + ROUNDING_S:
                self._free_from_s[track] = end_s
                return self._first + track
        track = len(self._labels)
        count = len(self._of_label[label])
        self._labels.append(label if not count else f"{label} ({count + 1})")
        self._free_from_s.append(end_s)
        self._of_label[label].append(track)
        return self._first + track

    def labels(self) -> Iterator[tuple[int, str]]:
        """Every track with its label."""
        for track, label in enumerate(self._labels):
            yield self._first + track, label
