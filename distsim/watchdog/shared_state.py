"""A page of shared memory in which a simulation writes which rank runs, for its watchdog.

A rank that holds the interpreter lock (the GIL) in C code cannot answer, and one that crashes cannot report. So the
scheduler writes which rank it lets run into a shared page, a few machine words per turn, and the watchdog
(process.py) reads it without any help of the simulating process. `ProcessOutcome` describes how such a process
ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Any

_TURN, _BEAT, _RANK, _THREAD, _LIMIT_MS, _ASKED, _BUSY, _EVENTS = range(8)
_TIME_AT = 16
"""Word (a double) with the virtual time; the numbers above are words as well."""
_TEXT_AT = 256
"""Offset in bytes of the description of the run: 4 bytes of length, then JSON."""
_PAGE_BYTES = 8192
_STACK_BYTES = 1 << 20
STACK_SIGNAL = signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else 0
"""Signal that asks a thread for its stack; 0 on macOS, which has no watchdog. Programs use signals from SIGRTMIN on."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$', re.MULTILINE)
_ALTERNATE_STACK_BYTES = 1 << 16


class SharedState:
    """The shared page and the file for stacks; both are memory (memfd), inherited or handed on by number."""

    def __init__(self, page_fd: int | None = None, stack_fd: int | None = None) -> None:
        self.page_fd = os.memfd_create("distsim-shared_state") if page_fd is None else page_fd
        self.stack_fd = os.memfd_create("distsim-stack", os.MFD_CLOEXEC) if stack_fd is None else stack_fd
        if page_fd is None:
            os.truncate(self.page_fd, _PAGE_BYTES)
        self._page = mmap.mmap(self.page_fd, _PAGE_BYTES)
        self._words = memoryview(self._page).cast("q")
        self._times = memoryview(self._page).cast("d")
        self._text: bytes = b""
        if page_fd is None:
            self._words[_RANK] = -1

    # -- the simulating process

    def describe(self, limit_s: float, **facts: Any) -> None:
        """Describe the coming run for a report from outside; *limit_s* is the limit of one turn."""
        self._words[_LIMIT_MS] = int(limit_s * 1e3)
        self._words[_RANK] = -1
        text = json.dumps({**facts, "began_s": time.monotonic()}).encode()
        if len(text) > _PAGE_BYTES - _TEXT_AT - 4:
            text = b"{}"
        self._page[_TEXT_AT : _TEXT_AT + 4 + len(text)] = len(text).to_bytes(4, "little") + text

    def rest(self) -> None:
        """Record that the run is over, so that the watchdog ignores the process."""
        self._words[_RANK] = -1
        self._words[_LIMIT_MS] = 0

    def give(self, rank: int, thread: int, now_s: float, events: int) -> None:
        """Note that a thread of *rank* (by its native id) gets the baton."""
        words = self._words
        words[_TURN] += 1
        words[_THREAD] = thread
        words[_EVENTS] = events
        self._times[_TIME_AT] = now_s
        words[_RANK] = rank

    def runs_in(self, thread: int) -> None:
        """Note the native id of a thread that has its first baton."""
        self._words[_THREAD] = thread

    def take(self) -> None:
        """Note that the scheduler has the baton."""
        self._words[_RANK] = -1

    def beat(self) -> None:
        """Note that the scheduler runs, so that no rank holds the interpreter lock."""
        self._words[_BEAT] += 1

    def noted_interrupt(self, number: int) -> None:
        """Note that signal *number* has arrived, so that it need not be passed on."""
        self._words[_ASKED] = number

    def leave_threads_behind(self) -> None:
        """Note that a thread was abandoned which may never end, so that the interpreter must not wait for it."""
        self._words[_BUSY] = 1

    def listen(self) -> None:
        """Let this process answer `STACK_SIGNAL` and leave a stack when it crashes, unless faulthandler is already
        on."""
        faulthandler.register(STACK_SIGNAL, file=self.stack_fd, all_threads=False, chain=False)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self.stack_fd, all_threads=False)

    # -- the watcher

    @property
    def turn(self) -> tuple[int, int, int]:
        """Return a counter that changes whenever something moves."""
        words = self._words
        return words[_TURN], words[_BEAT], words[_RANK]

    @property
    def rank(self) -> int | None:
        """Return the running rank; None if it is the scheduler, or if nothing runs."""
        rank = self._words[_RANK]
        return None if rank < 0 else rank

    @property
    def thread(self) -> int:
        return self._words[_THREAD]

    @property
    def now_s(self) -> float:
        return self._times[_TIME_AT]

    @property
    def events(self) -> int:
        return self._words[_EVENTS]

    @property
    def limit_s(self) -> float:
        return self._words[_LIMIT_MS] / 1e3

    @property
    def interrupt_seen(self) -> int:
        return self._words[_ASKED]

    @property
    def threads_left(self) -> bool:
        return bool(self._words[_BUSY])

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts stored by `describe`; empty before the simulation has begun."""
        size = int.from_bytes(self._page[_TEXT_AT : _TEXT_AT + 4], "little")
        with contextlib.suppress(ValueError):
            result = json.loads(self._page[_TEXT_AT + 4 : _TEXT_AT + 4 + size])
            if isinstance(result, dict):
                return result
        return {}

    @property
    def crash(self) -> str | None:
        """Return faulthandler's name of the crash, such as `Segmentation fault`, or None."""
        errors = re.findall(r"^Fatal Python error: (.*)$", self._left(), re.MULTILINE)
        return errors[-1] if errors else None

    def _left(self) -> str:
        size = os.fstat(self.stack_fd).st_size
        return os.pread(self.stack_fd, _STACK_BYTES, max(0, size - _STACK_BYTES)).decode(errors="replace")

    def stack(self) -> list[tuple[str, int, str]]:
        """Return file, line and function of the frames of the last stack that was left, innermost first."""
        text = self._left()
        last = text[max(text.rfind("\nCurrent thread"), text.rfind("\nThread "), 0) :]
        return [
            (match["file"], int(match["line"]) if match["line"].isdigit() else 0, match["function"])
            for match in _FRAME.finditer(last)
        ]

    def ask(self, pid: int, wait_s: float = 1.0) -> None:
        """Let the running thread of process *pid* write its stack, without its interpreter."""
        import ctypes

        before = os.fstat(self.stack_fd).st_size
        if ctypes.CDLL(None).tgkill(pid, self.thread, int(STACK_SIGNAL)) != 0:
            return
        size, deadline = before, time.monotonic() + wait_s
        while time.monotonic() < deadline:
            time.sleep(0.02)
            now = os.fstat(self.stack_fd).st_size
            if now == size > before:
                return
            size = now


_here: SharedState | None = None
_lit_by = 0
_alternate_stack: Any = None


def here() -> SharedState | None:
    """Return the page of this process; None if it is not watched, as after a fork of a watched process."""
    return _here if _lit_by == os.getpid() else None


def light(shared_state: SharedState | None) -> None:
    """Make *shared_state* the page of this process."""
    global _here, _lit_by
    _here, _lit_by = shared_state, os.getpid()


def crash_stack_for_this_thread() -> None:
    """Give the calling thread an alternative stack for faulthandler after a stack overflow. All threads share it,
    because a crash ends the process."""
    global _alternate_stack
    if _alternate_stack is None:
        import ctypes

        libc = ctypes.CDLL(None)

        class Stack(ctypes.Structure):
            _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))

        memory = ctypes.create_string_buffer(_ALTERNATE_STACK_BYTES)
        whole = Stack(ctypes.cast(memory, ctypes.c_void_p), 0, _ALTERNATE_STACK_BYTES)
        _alternate_stack = (memory, whole, ctypes.byref(whole), libc.sigaltstack)
    _, _, reference, sigaltstack = _alternate_stack
    sigaltstack(reference, None)


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """End of a simulating process that could not report it itself."""

    rank: int | None
    """The rank that ran; None: none did."""
    stack: tuple[tuple[str, int, str], ...]
    """File, line and function, innermost first."""
    signal_name: str | None
    """Signal of the crash; None: it was stuck and was ended from outside."""
    stuck_s: float
    now_s: float
    """Virtual time."""
    events: int
    wall_s: float
    """Wall time in seconds since the simulation began."""
    facts: dict[str, Any]
    reason: str = ""
    """Why the watchdog ended it, if it was not stuck."""
