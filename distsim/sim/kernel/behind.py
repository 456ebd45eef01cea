"""Futures that were made of a remote call's: who waits for one waits for that call."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from distsim.debug.records import HostWait, Wait

__all__ = ["made_of", "why_it_waits"]

_sources: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""Future -> those that it waits for, where calls are behind them: `why` says which (sim/rpc/agent/futures.py)."""


def made_of(future: Any, sources: Iterable[Any]) -> None:
    """*future* is done when *sources* are."""
    known = tuple(source for source in sources if hasattr(source, "why") or source in _sources)
    if known:
        _sources[future] = known


def why_it_waits(future: Any) -> Wait:
    """The first call behind *future* that is not over."""
    open_ = [future]
    while open_:
        one = open_.pop()
        if one.done():
            continue
        if hasattr(one, "why"):
            why: Wait = one.why
            return why
        open_.extend(reversed(_sources.get(one, ())))
    return HostWait("a torch.futures.Future")
