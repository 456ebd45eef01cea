"""`sys.modules` per process: one dict object, whose content is exchanged with the baton.

A process may have some thousand modules of its own (a framework and what it needs). To put them in and
take them out one by one would cost more than all the rest of a hand-over; so the dict stays the object
that Python, C code and programs hold, and what it holds is exchanged as a whole, in constant time.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

from distsim.sim.isolation.torch_state.words import TAGS_ARE_THERE, tag_at

__all__ = ["ModuleTable", "SharedImports"]

_HEAD_BYTES = object.__basicsize__
_BODY_BYTES = dict.__basicsize__ - _HEAD_BYTES
_KNOWN_BYTES = 4 * ctypes.sizeof(ctypes.c_void_p)
"""ma_used, a version tag, ma_keys, ma_values: CPython 3.6 to 3.14 (Include/cpython/dictobject.h)."""
if _BODY_BYTES != _KNOWN_BYTES:
    raise ImportError(f"distsim knows dicts of {_KNOWN_BYTES} bytes beside the head, this Python's have {_BODY_BYTES}")
_Body = ctypes.c_char * _BODY_BYTES


class SharedImports:
    """Names of the modules that a simulation shares between processes, in the order of their first import.
    The host's own `sys.modules` is where all others find them."""

    def __init__(self, apart: Sequence[str] = ()) -> None:
        self.names: list[str] = []
        self.collected = 0
        self.apart = apart
        """Packages that the host may have imported and no process has from it: their parts are each process's own, and
        would be attributes of one for all."""

    @property
    def may_be_lent(self) -> bool:
        """Whether a process may begin with the host's own: a write to it is noticed, and nothing in it is apart."""
        return TAGS_ARE_THERE and not any(name in sys.modules for name in self.apart)

    def lend(self) -> int:
        """The number of the host's `sys.modules`, of which there is a copy from now on."""
        number: int = _tag.value
        if _copy.number != number:
            _copy.held, _copy.number = dict(sys.modules), number
        return number

    def take_back(self) -> dict[str, Any]:
        """The host's is as it was when it was lent; what its process has made of it."""
        changed = _copy.held
        here, there = _body(sys.modules), _body(changed)
        _exchange(here, there)
        _copy.held, _copy.number = {}, 0
        return changed


class _Copy:
    """Of the host's `sys.modules` when its number was *number*. Good for every simulation of a process until something
    is imported: to make one, all modules are gone through."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.number = 0


_copy = _Copy()


class ModuleTable:
    """What `sys.modules` holds for one process. Begins with what the host has imported: with the host's own, lent,
    until the process writes to it, which most tests never do."""

    def __init__(self, shared: SharedImports) -> None:
        self._shared = shared
        self._seen = shared.collected
        self._here = _body(sys.modules)
        self._lent = 0
        """The number of the host's when it was lent; 0: it has its own."""
        if shared.may_be_lent:
            self._there, self._lent = self._here, shared.lend()
            return
        self._held = dict(sys.modules)
        for name in shared.apart:
            self._held.pop(name, None)
        self._there = _body(self._held)

    def enter(self) -> None:
        """`sys.modules` is the process's, with what others have imported for all meanwhile."""
        names, host = self._shared.names, sys.modules
        self._shared.collected = len(names)  # what the host imported itself since, it has
        if self._lent:
            self._seen = len(names)
            self._lent = self._shared.lend()
            return
        if self._seen < len(names):
            for name in names[self._seen :]:
                if name in host:
                    self._held.setdefault(name, host[name])
            self._seen = len(names)
        _exchange(self._here, self._there)

    def leave(self) -> None:
        """`sys.modules` is the host's again, which learns what was imported for all."""
        names = self._shared.names
        if self._lent:
            if self._lent == _tag.value:
                return
            self._held, self._lent = self._shared.take_back(), 0
            self._there = _body(self._held)
        else:
            _exchange(self._here, self._there)
        if self._shared.collected < len(names):
            for name in names[self._shared.collected :]:
                if name in self._held:
                    sys.modules.setdefault(name, self._held[name])
            self._seen = self._shared.collected = len(names)

    def follow(self, other: ModuleTable) -> None:
        """As `other.leave()` and `enter()`."""
        if self._lent and self._lent == other._lent == _tag.value:
            return
        names = len(self._shared.names)
        if self._lent or other._lent or self._shared.collected < names or self._seen < names:
            other.leave()
            self.enter()
            return
        # As in `_exchange`. What the host has, the other kept until now.
        here: Any = self._here
        theirs: Any = other._there
        there: Any = self._there
        theirs.raw, here.raw, there.raw = here.raw, there.raw, theirs.raw


def _body(table: dict[str, Any]) -> Any:
    return _Body.from_address(id(table) + _HEAD_BYTES)


_tag = ctypes.c_uint64.from_address(tag_at(sys.modules))
"""The number that each change of `sys.modules` gives it anew, where Python has them (words.py)."""


def _exchange(here: Any, there: Any) -> None:
    # No call of Python, no allocation that the collector knows, no backward jump: neither another thread nor a
    # finalizer can see the dicts between the two stores.
    here.raw, there.raw = there.raw, here.raw
