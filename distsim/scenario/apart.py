"""Runs one simulation in a process of its own: a hang or crash affects only itself."""

from __future__ import annotations

import io
import os
import pickle
import select
import signal
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distsim.scenario.expect.result import Result, replay_command
from distsim.scenario.file.load import Scenario
from distsim.watchdog import shared_state as beacons
from distsim.watchdog.process import CRASHES, POLL_S, Watch, die_with
from distsim.watchdog.shared_state import ProcessOutcome, SharedState

_FORKING = threading.Lock()
"""Held from a pipe's creation until its end in this process is closed: another child that inherited it would keep the
pipe open.
"""


@dataclass(frozen=True, slots=True)
class ApartResult:
    """What came of one scenario in a process of its own."""

    result: Result | None
    """None: the process was killed from outside."""
    peak_bytes: int = 0
    """Largest resident memory of the process."""
    signal_name: str = ""


@dataclass(frozen=True, slots=True)
class Forked:
    """How a fork of this process ended."""

    watch: Watch
    value: Any
    """What its function returned; None unless it ended by itself."""
    code: int
    """Exit code; negative: minus the number of the signal that killed it."""
    peak_bytes: int
    stuck: ProcessOutcome | None
    """What the watchdog saw that killed it."""

    @property
    def signal_name(self) -> str:
        """Return the signal that ended it; empty for none."""
        return signal.Signals(-self.code).name if self.code < 0 else ""


def run_forked(call: Callable[[], Any], cancelled: threading.Event | None = None, quiet: bool = False) -> Forked:
    """Call a function in a fork of this process, which should have imported what it needs, under the watchdog.

    Args:
        call: Its value must be picklable.
        cancelled: When it is set, the process is killed.
        quiet: Whether warnings are discarded, which would mix with progress lines.
    """
    shared_state = SharedState()
    with _FORKING, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: our other threads only wait
        read_end, child_end = os.pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            _child(call, shared_state, parent, child_end, quiet)
        os.close(child_end)
    watch, output = Watch(shared_state, pid), io.BytesIO()
    fate: ProcessOutcome | None = None
    try:
        while fate is None and not (cancelled is not None and cancelled.is_set()):
            if select.select([read_end], [], [], POLL_S)[0]:
                data = os.read(read_end, 1 << 20)
                output.write(data)
                if not data:
                    break
            if watch.stuck() or watch.exhausts_memory():
                fate = watch.fate()
        else:
            os.kill(pid, signal.SIGKILL)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(read_end)
        _, status, used = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    value = pickle.loads(output.getvalue()) if code == 0 and fate is None else None
    return Forked(watch, value, code, used.ru_maxrss * 1024, fate)


def run_apart(
    scenario: Scenario,
    run: Callable[[Scenario], Result],
    cancelled: threading.Event | None = None,
    quiet: bool = False,
) -> ApartResult:
    """Run *scenario* in a fork; *run* runs it, the rest as in `run_forked`."""
    ended = run_forked(lambda: run(scenario), cancelled, quiet)
    name, peak_bytes = ended.signal_name, ended.peak_bytes
    if ended.stuck is not None:
        return ApartResult(_fatal(scenario, ended.stuck), peak_bytes)
    if ended.code == 0:
        return ApartResult(ended.value, peak_bytes)
    if name in CRASHES and name != "SIGKILL":
        return ApartResult(_fatal(scenario, ended.watch.fate(-ended.code)), peak_bytes, name)
    if name:
        return ApartResult(None, peak_bytes, name)
    reason = f"its process ended with exit code {ended.code} and left no result"
    return ApartResult(failed(scenario, reason, code=ended.code), peak_bytes)


def _child(call: Callable[[], Any], shared_state: SharedState, parent: int, pipe_fd: int, quiet: bool) -> None:
    code = 1
    try:
        die_with(parent)
        beacons.light(shared_state)
        if quiet:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            os.close(null)
        with open(pipe_fd, "wb") as pipe:
            pickle.dump(call(), pipe)
        code = 0
    finally:
        os._exit(code)


def _fatal(scenario: Scenario, fate: ProcessOutcome) -> Result:
    from distsim.report.document import report_document
    from distsim.report.fate import fatal_outcome, fatal_text

    outcome = fatal_outcome(fate)
    reason = "its process crashed" if fate.signal_name else "limits.host_timeout_s: a rank holds the interpreter"
    reason = fate.reason or reason
    result = failed(scenario, reason, fatal_text(fate).lstrip("\n"), outcome.exit_code)
    result.document, result.wall_s = report_document(outcome), fate.wall_s
    if outcome.diagnoses:
        first = outcome.diagnoses[0]
        result.accuses(first, next(iter(first.sites.values()), None))
    return result


def failed(scenario: Scenario, reason: str, report: str = "", code: int = 1) -> Result:
    """Return the result of a scenario that ended without one, for *reason*."""
    replay = replay_command(scenario)
    return Result(scenario.name, str(scenario.path), [reason], report=report, replay=replay, exit_code=code)
