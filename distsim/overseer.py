"""A process that watches another one simulate, so that every run ends with a report.

The command line forks before it has imported anything heavy: the child simulates, the parent waits. The
child's exit code is the parent's. Where the child crashes, or a rank holds the interpreter for longer than
the host timeout, the parent ends it and tells what it knows (`Fate`) in its stead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from distsim import beacon as beacons
from distsim.beacon import Beacon

__all__ = ["Fate", "Watch", "can_watch", "fork_watched"]

POLL_S = 0.2
MARGIN_S = 1.0
"""A turn may last that much longer than the host timeout: the simulating process itself, where it still gets
the interpreter, says more than can be said from outside."""
FORWARD_S = 0.3
"""A signal of a whole process group has reached the child by then, too."""
CRASHES = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGKILL", "SIGSYS", "SIGTRAP")
"""What a process does not ask for. Other signals are somebody's wish, and the parent obeys it alike."""


@dataclass(frozen=True, slots=True)
class Fate:
    """How a process that simulated came to an end that it could not tell."""

    rank: int | None
    """The rank that ran; None: none did."""
    stack: tuple[tuple[str, int, str], ...]
    """File, line and function, innermost first."""
    signal_name: str | None
    """Of what crashed it; None: it was stuck, and ended from outside."""
    stuck_s: float
    now_s: float
    """Virtual time."""
    events: int
    wall_s: float
    """Since the simulation began."""
    facts: dict[str, Any]


class Watch:
    """Decides from a beacon, looked at again and again, whether a rank holds the interpreter for good."""

    def __init__(self, beacon: Beacon, pid: int) -> None:
        self.beacon = beacon
        self.pid = pid
        self.still_s = 0.0
        self._turn = beacon.turn
        self._looked_s = time.monotonic()

    def stuck(self) -> bool:
        """Look; time in which the process was stopped, or we were, or a debugger had it, does not count."""
        now_s = time.monotonic()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        turn = self.beacon.turn
        if turn != self._turn or self.beacon.rank is None or self.beacon.limit_s <= 0.0:
            self._turn, self.still_s = turn, 0.0
        elif not _held(self.pid):
            self.still_s += min(passed_s, 2 * POLL_S)
        return self.still_s > self.beacon.limit_s + MARGIN_S

    def fate(self, signal_number: int | None = None) -> Fate:
        """What can be said of a process that crashed, or is stuck and about to be ended."""
        if signal_number is None:
            self.beacon.ask(self.pid)
        name = None if signal_number is None else signal.Signals(signal_number).name
        beacon, facts = self.beacon, self.beacon.facts
        return Fate(
            rank=beacon.rank,
            stack=tuple(beacon.stack()),
            signal_name=name,
            stuck_s=self.still_s,
            now_s=beacon.now_s,
            events=beacon.events,
            wall_s=time.monotonic() - float(facts.get("began_s", time.monotonic())),
            facts=facts,
        )


def _held(pid: int) -> bool:
    """Whether the process is stopped, or somebody traces it."""
    try:
        with open(f"/proc/{pid}/status") as file:
            said = dict(line.split(":", 1) for line in file if line.startswith(("State", "TracerPid")))
    except OSError:
        return False
    return said.get("State", "").strip()[:1] in "Tt" or said.get("TracerPid", "0").strip() != "0"


def can_watch() -> bool:
    """Whether this process may fork: it is one thread, and nobody steps through it."""
    return hasattr(os, "memfd_create") and sys.gettrace() is None and threading.active_count() == 1


def fork_watched(explain: Callable[[Fate], int]) -> None:
    """Fork. The child returns and goes on as if nothing had been; the parent never returns: it exits with the
    child's code, or with what *explain* answers to the fate of a child that cannot tell."""
    beacon = Beacon()
    watched = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        die_with(parent)
        beacons.light(beacon)
        return
    _exit(_outlive(pid, beacon, watched, explain))


def die_with(parent: int) -> None:
    """End this process when *parent* does: whoever kills that one means both."""
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _outlive(pid: int, beacon: Beacon, watched: set[signal.Signals], explain: Callable[[Fate], int]) -> int:
    watch = Watch(beacon, pid)
    asked: list[tuple[float, int]] = []
    while True:
        came = signal.sigtimedwait(watched, POLL_S)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if came is not None and came.si_signo != signal.SIGCHLD and came.si_code <= 0:  # not the terminal's
            asked.append((time.monotonic() + FORWARD_S, came.si_signo))
        while asked and asked[0][0] <= time.monotonic():
            _, number = asked.pop(0)
            if number != signal.SIGINT or not beacon.interrupt_seen:
                os.kill(pid, number)
        if watch.stuck():
            fate = watch.fate()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return explain(fate)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    if signal.Signals(-code).name in CRASHES:
        return explain(watch.fate(-code))
    signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    os.kill(os.getpid(), -code)
    return 128 - code


def _exit(code: int) -> NoReturn:
    """Leave without what an interpreter does at its end: all that was written is the child's, or is flushed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
