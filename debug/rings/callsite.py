"""Finds the user's frames of a call, once for each way to the call.

A way is every position on the stack from the call outward, so a helper that is reached from two lines, however far
above it, has two sites. Looking a way up takes a third of a microsecond per frame, and ten times that with cold
caches; so each frame keeps the part beyond it for the next time. The frames that started the program, below the
module's own frame, are not walked. Checking whether a way is already known takes a third of looking it up
(`standing`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, FrameType
from typing import Any
from zlib import crc32

from distsim.debug.records import Site
from distsim.debug.records.circumstances import EXIT_HANDLER, note_handlers
from distsim.debug.records.frames import Frame, Owner, outward, owner, program_frames, steps, torchs_thread
from distsim.debug.rings.layout import TABLE_BYTES, TABLE_SITE, W_TABLE_USED, WORDS_AT
from distsim.debug.rings.writer import RingWriter

Place = tuple[int, int, str]
FUNCTIONAL = "/_functional_collectives.py"
"""torch's module of collectives whose results wait when they are read."""

MOST = 4096
"""Largest number of call paths that are cached, because a program that generates code could otherwise fill the memory.
"""

FAR = 2 * 4 + 1
"""Length of a call path (two numbers for each frame) up to which it is walked without caching."""
RESUMED = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR

_bottom: FrameType | None = None
"""Frame of the module at the bottom of the main thread's stack.

It may be kept, because its locals are those of the module.
"""


def calling(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is not machinery: the one that called torch."""
    while frame is not None and not owner(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


Way = tuple[Any, ...]
"""A call path. Equal paths belong to the same stack; code that keeps a path must also keep its `codes_of`."""


class _Outward:
    """The call path from a frame's caller outward, stored in the frame's `f_trace`, which only a tracer reads.

    While a function's frame is on the stack, its callers do not move. There is one object for each call path. It stands
    for the rest of every longer path that ends in it, and is compared by identity.
    """

    def __call__(self, *_: object) -> _Outward:
        """Act as a tracer that does nothing, for a program that traces this frame."""
        return self


class _HalfWay(_Outward):
    """A mark at a frame that may have returned by the next call.

    It only shortens a walk, so a stale one does no harm.
    """


_outward: dict[tuple[type[_Outward], Way], tuple[_Outward, tuple[CodeType, ...]]] = {}


def way_to(frame: FrameType) -> Way:
    """Return every position on the stack from *frame* outward, which is the same until one of its frames returns.

    Code objects are compared by id, because hashing them would hash their constants.
    """
    way = _walk(frame)
    while len(way) > FAR and _leave(frame, way):
        way = _walk(frame)
    return tuple(way)


def _walk(frame: FrameType) -> list[Any]:
    way: list[Any] = []
    bottom = _bottom
    walk: FrameType | None = frame
    while walk is not None:
        way += id(walk.f_code), walk.f_lasti
        if walk is bottom:
            break
        left = walk.f_trace
        if left is not None and isinstance(left, _Outward):
            way.append(left)
            break
        walk = walk.f_back
    return way


def _leave(frame: FrameType, way: Sequence[Any]) -> bool:
    """Keep the outward way at a frame in the middle; return False if no frame can keep it.

    The next walk is half as long, until only frames are walked that are new in each call.
    """
    half = len(way) // 4
    at: FrameType | None = frame
    for _ in range(half):
        at = at.f_back if at is not None else None
    # A generator may be resumed from elsewhere.
    if at is None or at.f_trace is not None or at.f_code.co_flags & RESUMED or sys.gettrace() is not None:
        return False
    at.f_trace = _mark_of(_HalfWay, way[2 * half + 2 :], at.f_back)
    return True


def _mark_of(kind: type[_Outward], way: Sequence[Any], frame: FrameType | None) -> _Outward:
    """Return the mark that represents the call path to a frame."""
    beyond = kind, tuple(way)
    known = _outward.get(beyond)
    if known is None:
        if len(_outward) >= MOST:
            _outward.clear()
        known = _outward[beyond] = (kind(), codes_of(frame))
    return known[0]


def leave_marks(frame: FrameType | None) -> None:
    """Mark each outer frame with the call path beyond it, so that frames that stay are not walked again."""
    if sys.gettrace() is not None:
        return
    walked: list[FrameType] = []
    while frame is not None and (frame.f_trace is None or type(frame.f_trace) is _HalfWay):
        walked.append(frame)
        if frame is _bottom:
            break
        frame = frame.f_back
    for at in reversed(walked):
        if not at.f_code.co_flags & RESUMED:
            outer = None if at is _bottom else at.f_back
            at.f_trace = _mark_of(_Outward, _walk(outer) if outer is not None else (), outer)


Standing = tuple[tuple[tuple[CodeType, int], ...], _Outward]
"""Code and position of the frames outward from a frame's caller to the first that has a mark, and that mark."""


def standing(frame: FrameType, at_least: int = 0) -> Standing | None:
    """Return the stack by the marks of `stands`, with *at_least* this many frames; None if a frame cannot be marked."""
    steps: list[tuple[CodeType, int]] = []
    walk: FrameType = frame
    while type(walk.f_trace) is not _Outward or len(steps) < at_least:
        if walk.f_back is None:
            return None
        walk = walk.f_back
        steps.append((walk.f_code, walk.f_lasti))
    return tuple(steps), walk.f_trace


def stands(frame: Any, there: Standing) -> bool:
    """Return whether the callers of a frame are still at the same positions."""
    steps, mark = there
    last = after(frame, steps)
    return last is not None and last.f_trace is mark


def after(frame: Any, steps: Sequence[tuple[CodeType, int]]) -> FrameType | None:
    """Return the last of the frames outward from a frame's caller, if they have this code and these positions."""
    for code, position in steps:
        frame = frame.f_back
        if frame is None or frame.f_code is not code or frame.f_lasti != position:
            return None
    return frame  # type: ignore[no-any-return]


def codes_of(frame: FrameType | None) -> tuple[CodeType, ...]:
    """Return the code objects on a stack; holding them keeps their ids valid."""
    return tuple(one.f_code for one in outward(frame))


def _find_bottom(frame: FrameType | None) -> None:
    """Remember the outermost frame of a module of the program."""
    global _bottom
    for one in outward(frame):
        if one.f_code.co_name == "<module>" and owner(one.f_code.co_filename) is Owner.USER:
            _bottom = one


def _called_by(caller: FrameType, innermost: FrameType | None) -> str:
    """Return the name of the function that the frame *caller* called; torch's decorators are looked through.

    FUNCTIONAL if it is, or calls, a functional collective.
    """
    name = ""
    while innermost is not None and innermost is not caller:
        if innermost.f_code.co_filename.endswith(FUNCTIONAL):
            return FUNCTIONAL
        if innermost.f_code.co_name not in ("wrapper", "inner", "_fn", "decorate_context"):
            name = innermost.f_code.co_name
        innermost = innermost.f_back
    return name


class CallSites:
    """Call sites of one process, interned in its ring."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._known: dict[Way, Place] = {}
        self._kept: list[tuple[CodeType, ...]] = []

    def here(self, skip: int = 2) -> Place:
        """Return the call *skip* frames up: its offset in the table, its hash (of file and line), and the function
        of torch's that was called there (`send`, `isend`, `backward`).
        """
        frame = calling(sys._getframe(skip))
        if frame is None:
            own = torchs_thread(steps(sys._getframe(skip)))
            return self.intern(own) if own else self._elsewhere(())
        way = way_to(frame)
        site = self._known.get(way)
        return site if site is not None else self._look(frame, sys._getframe(skip))

    def knows(self, way: Way) -> bool:
        """Return whether the site of a call path is cached, which requires that it depends only on the path."""
        return way in self._known

    def _look(self, frame: FrameType, innermost: FrameType) -> Place:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main:
            note_handlers()
        frames = program_frames(_with_start(innermost, is_main))
        called = _called_by(frame, innermost)
        if frames and owner(frames[0].file) is Owner.LIBRARY and not _of_python(frame):
            return self._elsewhere(frames, called)
        if is_main:
            _find_bottom(frame)
        if len(self._known) >= MOST:
            self._known.clear()
            self._kept.clear()
        self._kept.append(codes_of(frame))
        result = self._known[way_to(frame)] = self.intern(frames, called)
        return result

    def intern(self, frames: Sequence[Site], called: str = "") -> Place:
        """Return the table offset and hash of these frames."""
        if not frames:
            return 0, 0, called
        if self._ring.words[WORDS_AT // 8 + W_TABLE_USED] > TABLE_BYTES // 2:
            frames = frames[:1]  # many ways to a few lines: there is room for these
        key = tuple((site, site.inside) for site in frames)
        offset = self._ring.entry(TABLE_SITE, key, frames)
        first = frames[0]
        return offset, crc32(f"{first} {first.through or ''}".encode()) or 1, called

    def _elsewhere(self, own: Sequence[Site], called: str = "") -> Place:
        """Return the main thread's position for a thread without user code, or else its own frames.

        Python did not start such a thread (autograd's on an accelerator).
        """
        main = threading.main_thread().ident
        frame = sys._current_frames().get(main) if main is not None else None
        return self.intern(program_frames(steps(frame)) or own, called)


def _with_start(innermost: FrameType, is_main: bool) -> list[Frame]:
    """Return the stack with what has started it, if that is not the program: Python calls exit handlers without a
    caller.
    """
    stack = list(steps(innermost))
    if is_main and stack[-1][2] not in ("<module>", "_run_module_as_main", "_bootstrap"):
        stack.append((f"<{EXIT_HANDLER}>", 0, ""))
    return stack


def _of_python(frame: FrameType) -> bool:
    """Return whether Python started the frame's thread: it is the program's, or `threading`'s."""
    *_, outermost = outward(frame)
    return outermost.f_code.co_name in ("<module>", "_run_module_as_main", "_bootstrap")
