"""Maps a future to the calls that complete it, so that a wait for the future counts as a wait for those calls."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from distsim.debug.records import HostWait, Wait
from distsim.torch_compat.works import FUTURE

__all__ = ["calls_behind", "is_done", "made_of", "why_it_waits"]

_Future = FUTURE.get()

is_done = _Future.done
"""torch's own, which takes no time."""

_sources: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""Future -> those that it waits for, where calls are behind them: `why` says which (Reply, CallFuture)."""


def made_of(future: Any, sources: Iterable[Any]) -> None:
    """*future* is done when *sources* are."""
    known = tuple(source for source in sources if hasattr(source, "why") or source in _sources)
    if known:
        _sources[future] = known


def calls_behind(future: Any) -> Iterator[Any]:
    """The futures of the calls behind *future* that are not over, in order."""
    open_ = [future]
    while open_:
        one = open_.pop()
        if is_done(one):
            continue
        if hasattr(one, "why"):
            yield one
        else:
            open_.extend(reversed(_sources.get(one, ())))


def why_it_waits(future: Any) -> Wait:
    """The first call behind *future* that is not over."""
    for one in calls_behind(future):
        why: Wait = one.why
        return why
    return HostWait("a torch.futures.Future")
