"""Python's garbage collector while a simulation runs: it looks at what the run has made, not at torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["own_threshold", "paced", "set_aside", "set_more_aside"]

YOUNG_PER_FULL = 1_000
"""Collections of young objects after which garbage of earlier runs is looked for. Python's own measure for a full one
is 11 x 11 of them and a quarter more objects than before; a process with torch has 300,000, and a test of 4 ranks
leaves 700 behind, in 200 KiB."""
_young_at_last_full: float | None = None
"""None: no simulation ran in this process, so there is no garbage of one. What torch's import left is a third of a
second's walk, and next to nothing."""
_spared = 0.0
"""Collections of young objects that setting aside has spared: it begins the count of them anew."""
_is_ours = False
"""Whether what is set aside now was set aside here."""

RANKS_AT_A_PACE, MOST_PACES = 16, 64
"""A process of its own has its collector come after 700 objects more; among thousands of ranks in one process it would
come after each has made less than one, and walk through what all of them hold: a seventh of a run of 1,024 ranks, a
quarter of one of 4,096. What so many ranks may leave behind before it comes is what one of them may, up to 64 times:
45,000 objects."""
_get_threshold, _set_threshold = gc.get_threshold, gc.set_threshold
_slowed: tuple[int, int, int] | None = None
"""Thresholds while a run of many ranks is on, where its program has set none."""
_before: tuple[int, int, int] | None = None
"""What they were."""


@contextmanager
def set_aside() -> Iterator[None]:
    """Within this, what there was before has no part in collections: some 300,000 objects of torch and Python, which a
    full one would walk through again and again. Where somebody has set objects aside already, all stays as it is."""
    global _young_at_last_full, _is_ours
    if gc.get_freeze_count() or not gc.isenabled():
        yield
        return
    young = gc.get_stats()[0]["collections"] + _spared
    if _young_at_last_full is None:
        _young_at_last_full = young
    elif young - _young_at_last_full > YOUNG_PER_FULL:
        gc.collect()
        _young_at_last_full = young
    _is_ours = True
    _freeze()
    try:
        yield
    finally:
        _is_ours = False
        gc.unfreeze()


@contextmanager
def paced(ranks: int) -> Iterator[None]:
    """Within this, the collector comes as seldom as *ranks* ask for. Where it is switched off it stays so."""
    global _slowed, _before, _spared
    found, paces = _get_threshold(), min(ranks // RANKS_AT_A_PACE, MOST_PACES)
    if paces < 2 or not found[0] or _slowed is not None or not gc.isenabled():
        yield
        return
    _before, _slowed = found, (found[0] * paces, *found[1:])
    _set_threshold(*_slowed)
    young = gc.get_stats()[0]["collections"]
    try:
        yield
    finally:
        _spared += (gc.get_stats()[0]["collections"] - young) * (paces - 1)
        if _get_threshold() == _slowed:
            _set_threshold(*_before)
        _before = _slowed = None


def own_threshold() -> tuple[int, int, int]:
    """`gc.get_threshold`, as if no other rank were there."""
    found = _get_threshold()
    return _before if _before is not None and found == _slowed else found


def set_more_aside() -> None:
    """What a simulation was made of until now lives as long as it does: it has no part in collections, either."""
    if _is_ours:
        _freeze()


def _freeze() -> None:
    global _spared
    _spared += gc.get_count()[0] / max(1, gc.get_threshold()[0])
    gc.freeze()
