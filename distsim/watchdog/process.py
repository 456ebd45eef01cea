"""The watchdog: a process that watches a simulating process, so that every run ends with a report.

The command line forks before it has imported anything large: the child simulates, and the parent waits. The child's
exit code is the parent's. If the child crashes, or a rank holds the interpreter lock for longer than the host
timeout, the parent ends it and reports what it knows (`ProcessOutcome`).

A process that distsim did not start (pytest, a script that calls `distsim.simulate`) is watched by a separate bare
interpreter, which its first simulation starts, and which ends with it. It is not a child of the program, which may
wait for all its children (`os.wait`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from distsim.watchdog import shared_state as beacons
from distsim.watchdog.shared_state import ProcessOutcome, SharedState

POLL_S = 0.2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MARGIN_S = 1.0
"""Seconds by which a turn may exceed the host timeout: the simulating process itself can report more, if it gets to
run.
"""
FORWARD_S = 0.3
"""A signal of a whole process group has reached the child by then, too."""
LEAST_AVAILABLE, LEAST_OWN = 0.03, 0.25
"""Shares of this machine's memory: a simulation is ended if less than the first is left while it has more than the
second. The machine would hardly move any more until the kernel ends some process.
"""
CRASHES = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGKILL", "SIGSYS", "SIGTRAP")
"""Signals that mean a crash. Other signals are sent on purpose, and the parent obeys them, too."""


class Watch:
    """Decides by repeated reads of a shared_state whether a rank holds the interpreter lock forever."""

    def __init__(self, shared_state: SharedState, pid: int) -> None:
        self.shared_state = shared_state
        self.pid = pid
        self.still_s = 0.0
        self.reason = ""
        """Why the process has to be ended, if not because it is stuck."""
        self._turn = shared_state.turn
        self._looked_s = time.monotonic()
        self._used_s = _used(pid)
        self._read = _read_bytes(pid)

    def stuck(self) -> bool:
        """Look; time in which the process was stopped, or we were, or a debugger had it, or no core was free for it,
        or the disk had not brought all it read, does not count."""
        now_s, used_s, read = time.monotonic(), _used(self.pid), _read_bytes(self.pid)
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        worked_s, self._used_s = used_s - self._used_s, used_s
        turn, runnable = self.shared_state.turn, _runnable(self.pid, self.shared_state.thread)
        reads, self._read = read != self._read and not runnable, read
        if turn != self._turn or reads or self.shared_state.rank is None or self.shared_state.limit_s <= 0.0:
            self._turn, self.still_s = turn, 0.0
        elif not _held(self.pid):
            self.still_s += min(worked_s if runnable else passed_s, 2 * POLL_S)
        return self.still_s > self.shared_state.limit_s + MARGIN_S

    def exhausts_memory(self) -> bool:
        """Look whether a simulation is using up this machine's memory."""
        total, available = machine_memory()
        own = resident_bytes(self.pid)
        if self.shared_state.limit_s > 0.0 and available < LEAST_AVAILABLE * total and own > LEAST_OWN * total:
            self.reason = f"its process was using up this machine's memory ({own / 1e9:.1f} of {total / 1e9:.1f} GB)"
        return bool(self.reason)

    def fate(self, signal_number: int | None = None, crash: str | None = None) -> ProcessOutcome:
        """Return the known state of a process that crashed, or that is stuck and about to be ended."""
        if signal_number is None and crash is None:
            self.shared_state.ask(self.pid)
            crash = "SIGKILL" if self.reason else None
        name = crash if signal_number is None else signal.Signals(signal_number).name
        shared_state, facts = self.shared_state, self.shared_state.facts
        return ProcessOutcome(
            rank=shared_state.rank,
            stack=tuple(shared_state.stack()),
            signal_name=name,
            stuck_s=self.still_s,
            now_s=shared_state.now_s,
            events=shared_state.events,
            wall_s=time.monotonic() - float(facts.get("began_s", time.monotonic())),
            facts=facts,
            reason=self.reason,
        )


def machine_memory() -> tuple[int, int]:
    """Return the memory of this machine, and what processes can still get of it, in bytes (proc_meminfo(5)), or the
    less that a control group allows them: that of a container, or of a job of SLURM."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    of_machine = int(fields["MemTotal"].split()[0]) * 1024, int(fields["MemAvailable"].split()[0]) * 1024
    totals, available = zip(of_machine, *group_memory(), strict=True)
    return min(totals), min(available)


_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controllers of a control group of v2, and of v1: files of its limit and its use, and the key in memory.stat of
cached files, which the kernel gives up first."""


def group_memory(groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group of this process, and what is left of it, in bytes (cgroups(7))."""
    with contextlib.suppress(OSError), open(groups) as file:
        for _, controllers, path in (line.rstrip("\n").split(":", 2) for line in file):
            for above in range(path.count("/") + 1) if controllers in _GROUP_FILES else ():
                folder = f"{root}/{controllers}{path.rsplit('/', above)[0]}"
                limit, used, cached = _GROUP_FILES[controllers]
                with contextlib.suppress(OSError, ValueError, KeyError):  # none there, or no limit: "max"
                    left = int(_text(f"{folder}/{limit}")) - int(_text(f"{folder}/{used}"))
                    stat = dict(line.split() for line in _text(f"{folder}/memory.stat").splitlines())
                    yield int(_text(f"{folder}/{limit}")), left + int(stat[cached])


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has; 0 if it has ended."""
    fields = _stat(f"/proc/{pid}/stat")
    return int(fields[21]) * mmap.PAGESIZE if fields else 0


def _held(pid: int) -> bool:
    """Return whether the process is stopped or traced."""
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file if line.startswith(("State", "TracerPid")))
    except OSError:
        return False
    return fields.get("State", "").strip()[:1] in "Tt" or fields.get("TracerPid", "0").strip() != "0"


def _stat(path: str) -> list[bytes]:
    """Parse a stat file of /proc after the name: state first, CPU times at 11 and 12, resident pages at 21."""
    try:
        with open(path, "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _used(pid: int) -> float:
    """Return the CPU seconds of all threads of a process."""
    fields = _stat(f"/proc/{pid}/stat")
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if fields else 0.0


def _read_bytes(pid: int) -> bytes:
    """Return what disks have brought for a process, pages of programs and files among it (proc_pid_io(5))."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/io", "rb") as file:
        return next((line for line in file if line.startswith(b"read_bytes")), b"")
    return b""


def _runnable(pid: int, thread: int) -> bool:
    """Return whether a thread of a process runs, or would if a core were free."""
    return _stat(f"/proc/{pid}/task/{thread or pid}/stat")[:1] == [b"R"]


def can_watch() -> bool:
    """Return whether this process may fork: it has one thread, and is not being debugged."""
    return hasattr(os, "memfd_create") and sys.gettrace() is None and threading.active_count() == 1


def fork_watched(explain: Callable[[ProcessOutcome], int]) -> None:
    """Fork. The child returns and continues; the parent never returns.

    The parent exits with the child's code, or with the result of *explain* for a child that cannot report its end.
    """
    shared_state = SharedState()
    watched = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        die_with(parent)
        beacons.light(shared_state)
        return
    _exit(_outlive(pid, shared_state, watched, explain))


def die_with(parent: int) -> None:
    """End this process when *parent* ends, because a user who kills the parent wants to end both."""
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def watch_from_outside() -> None:
    """Start a process that watches this one, unless one exists or another process watches already."""
    if beacons.here() is not None or not hasattr(os, "memfd_create") or sys.gettrace() is not None:
        return
    shared_state = SharedState()
    ours, _theirs = os.pipe()  # reads as ended once this process has
    try:
        error = os.dup(2 if REPORT_FD is None else REPORT_FD)
        words = [str(number) for number in (os.getpid(), shared_state.page_fd, shared_state.stack_fd, ours, error)]
        for number in (shared_state.page_fd, shared_state.stack_fd, ours, error):
            os.set_inheritable(number, True)
        code = (
            "import os, sys\n"
            "if os.fork(): os._exit(0)\n"
            "sys.path[:] = eval(sys.argv[1])\n"
            "from distsim.watchdog.process import watch_process\n"
            "watch_process()"
        )
        null = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
        house = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        paths = repr([house, *(path for path in sys.path if path)])
        started = os.posix_spawn(
            sys.executable, [sys.executable, "-c", code, paths, *words], os.environ, file_actions=null
        )
        with contextlib.suppress(ChildProcessError):  # a handler of the program's has seen to it
            os.waitpid(started, 0)  # what it leaves is nobody's child: a program may wait for all of its own
    except OSError:  # no process to be had: then nobody watches
        return
    finally:
        os.close(ours)
    for number in (shared_state.page_fd, shared_state.stack_fd):
        os.set_inheritable(number, False)
    os.close(error)
    beacons.light(shared_state)
    _end_with_3_on_quit()


REPORT_FD: int | None = None
"""Descriptor of the real stderr, for code that later redirects it."""


def _end_with_3_on_quit() -> None:
    """Make SIGQUIT end this process with exit code 3 (the number of SIGQUIT), even if no Python code can run.

    The watchdog ends the process this way.
    """
    import ctypes

    if signal.getsignal(signal.SIGQUIT) is not signal.SIG_DFL:
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(int(signal.SIGQUIT), ctypes.cast(libc._exit, ctypes.c_void_p))


def _gone(pid: int) -> bool:
    """Return whether the process has ended; a zombie has."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except ProcessLookupError:
        return True
    except OSError:
        return False


def watch_process() -> None:
    """Run as the watchdog process, with the arguments that `watch_from_outside` passes."""
    import select

    pid, page, stack, life, error = map(int, sys.argv[2:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # it ends when the watched process does
    shared_state = SharedState(page, stack)
    watch = Watch(shared_state, pid)
    while True:
        ended = bool(select.select([life], [], [], POLL_S)[0])
        if ended or _gone(pid):
            if shared_state.rank is not None and (crash := shared_state.crash) is not None:
                _tell(watch.fate(crash=crash), error)
            elif shared_state.rank is not None:  # somebody else has told how, or nobody can
                program = shared_state.facts.get("program")
                text = f"distsim: the process ended while rank {shared_state.rank} of {program} ran\n"
                os.write(error, text.encode(errors="replace"))
            return
        if watch.stuck() or watch.exhausts_memory():
            _tell(watch.fate(), error)
            os.kill(pid, signal.SIGQUIT)
            if not select.select([life], [], [], 2.0)[0]:
                os.kill(pid, signal.SIGKILL)
            return


def _tell(fate: ProcessOutcome, error: int) -> None:
    from distsim.report.fate import fatal_text

    with contextlib.suppress(OSError):
        os.write(error, fatal_text(fate).encode(errors="replace"))


def next_signal(watched: set[signal.Signals], pid: int, wait_s: float) -> signal.struct_siginfo | None:
    """Return a blocked signal of *watched* that has come, after *wait_s* at the latest or when child *pid* has ended.

    `signal.sigtimedwait` with a limit returns signals that nobody sent if this process was stopped (Ctrl-Z) for longer
    than the limit: seen on CPython 3.11.7, which then returns a structure that it has not filled.
    """
    import select

    try:
        ended = os.pidfd_open(pid)
    except OSError:  # a kernel before 5.3
        time.sleep(0.02)
    else:
        select.select([ended], [], [], wait_s)
        os.close(ended)
    return signal.sigtimedwait(watched, 0)


def _outlive(
    pid: int, shared_state: SharedState, watched: set[signal.Signals], explain: Callable[[ProcessOutcome], int]
) -> int:
    watch = Watch(shared_state, pid)
    forwarded: list[tuple[float, int]] = []
    terminated = False
    while True:
        came = next_signal(watched, pid, POLL_S)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if came is not None and came.si_code <= 0:  # not the terminal's
            forwarded.append((time.monotonic() + FORWARD_S, came.si_signo))
            terminated = terminated or came.si_signo == signal.SIGTERM
        while forwarded and forwarded[0][0] <= time.monotonic():
            _, number = forwarded.pop(0)
            if number != shared_state.interrupt_seen:
                os.kill(pid, number)
        if watch.stuck() or watch.exhausts_memory():
            fate = watch.fate()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return explain(fate)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return 128 + signal.SIGTERM if terminated and code == 128 + signal.SIGINT else code
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
