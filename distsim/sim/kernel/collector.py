"""Python's garbage collector while a simulation runs: it looks at what the run has made, not at torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["set_aside", "set_more_aside"]

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


def set_more_aside() -> None:
    """What a simulation was made of until now lives as long as it does: it has no part in collections, either."""
    if _is_ours:
        _freeze()


def _freeze() -> None:
    global _spared
    _spared += gc.get_count()[0] / max(1, gc.get_threshold()[0])
    gc.freeze()
