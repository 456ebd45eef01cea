"""Heartbeat thread: shows that the process lives, that its GIL is free, and where its main thread is."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import torch.distributed as dist

from distsim.debug.monitor.start import gone_text
from distsim.debug.records.frames import program_frames, shown, steps
from distsim.debug.rings import layout as rings
from distsim.realexec.guard.recorder import Recorder
from distsim.text import original_print

__all__ = ["BEAT_S", "Heartbeat"]

BEAT_S = 0.1
"""Seconds between heartbeats. One costs about 20 us of the interpreter, so 0.01 to 0.02 percent."""
LEAVE_S = 2.0
"""Seconds that the process waits at its end for a heartbeat that is being written."""


class Heartbeat:
    """Thread that writes heartbeats into the ring.

    It also records the end of asynchronous calls, and the position of a main thread that does not move.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.main_thread().ident or 0
        self._last: tuple[FrameType | None, int, int] = (None, 0, 0)
        self._count = -1
        self._looked = False
        self._placed = threading.RLock()
        """Lock held while a position is written. It is reentrant, because a signal handler may end the process in
        between.
        """
        self._kept = self._left = False
        self.makes_unwatched_calls = False
        """Whether the program has constructed a process group itself, whose calls are not recorded."""
        self.look: Callable[[], None] | None = None
        """Called once each time the main thread stops moving."""
        self.monitor: subprocess.Popen[bytes] | None = None
        """Monitor that this process has started; None if it has not."""

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="distsim-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it.

        If the interpreter shuts down while a thread is inside torch's C++ (polling works, dropping them), Python
        3.11 aborts the process (SIGABRT).
        """
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(LEAVE_S)

    def keep_position(self) -> None:
        """Continue the heartbeat without updating the position, because the process is ending."""
        with self._placed:
            self._kept = True

    def _run(self) -> None:
        words = self._recorder.ring.words
        base = rings.WORDS_AT // 8
        while not self._stop.wait(BEAT_S):
            try:
                words[base + rings.W_BEAT] = time.monotonic_ns()
                self._recorder.sweep()
                self._membership()
                self._look_after_monitor()
                with self._placed:
                    if not self._kept:
                        self._position()
            except (ValueError, TypeError):  # the ring was closed, or the interpreter goes down
                return

    def _membership(self) -> None:
        """Record whether further calls are expected: not after the default group was destroyed, or if a group is not
        watched.
        """
        words, base = self._recorder.ring.words, rings.WORDS_AT // 8
        left = self.makes_unwatched_calls or bool(words[base + rings.W_JOINED] and not dist.is_initialized())
        if left != self._left:
            self._left = left
            words[base + rings.W_LEFT] = left

    def _look_after_monitor(self) -> None:
        """Report once if the monitor was killed. A monitor that ends by itself reports why."""
        if self.monitor is None or self.monitor.poll() is None:
            return
        monitor, self.monitor = self.monitor, None
        if monitor.returncode < 0:
            original_print(gone_text(monitor.pid, monitor.returncode), file=sys.stderr, flush=True)

    def _position(self) -> None:
        """Record the position of the main thread if it has made no call since the last heartbeat."""
        count = self._recorder.ring.words[rings.WORDS_AT // 8 + rings.W_COUNT]
        if count != self._count:
            self._count = count
            return
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return
        here = (frame, frame.f_lasti, count)
        if here[0] is not self._last[0] or here[1:] != self._last[1:]:
            self._last = here
            self._looked = False
            # The frame below the user's own, too: "in DataLoader.__next__" says more than a line.
            keys: list[str] = []
            if frame.f_code.co_name == "distsim_store_wait":
                local_keys = frame.f_locals.get("keys", ())
                keys = [local_keys] if isinstance(local_keys, str) else [str(key) for key in local_keys]
            inner = (shown(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_qualname)
            self._recorder.ring.position(inner, [site.to_json() for site in program_frames(steps(frame))], keys)
        elif not self._looked and self.look is not None:
            self._looked = True
            self.look()
