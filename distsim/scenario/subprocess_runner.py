"""Runs each scenario in a process of its own under the watchdog, so that a hang or crash affects only itself."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from distsim.scenario.expect.result import Result, replay_command
from distsim.scenario.file.load import Scenario
from distsim.watchdog import shared_state as beacons
from distsim.watchdog.process import CRASHES, POLL_S, Watch, die_with
from distsim.watchdog.shared_state import ProcessOutcome, SharedState

__all__ = ["as_they_end", "run_apart"]


@dataclass
class _Child:
    """One scenario under way."""

    scenario: Scenario
    pid: int
    pipe: int
    watch: Watch
    said: io.BytesIO = field(default_factory=io.BytesIO)


def run_apart(scenarios: Sequence[Scenario], workers: int, run: Callable[[Scenario], Result]) -> Iterator[Result]:
    """Results in the order of *scenarios*, as they come; at most *workers* at a time. The process must be able to
    fork (`process.can_watch`), and have imported what all need."""
    results: dict[int, Result] = {}
    waiting = 0
    for number, result in as_they_end(scenarios, workers, run):
        results[number] = result
        while waiting in results:
            yield results.pop(waiting)
            waiting += 1


def as_they_end(
    scenarios: Sequence[Scenario], workers: int, run: Callable[[Scenario], Result]
) -> Iterator[tuple[int, Result]]:
    """Yield each result with its scenario's place, whichever ends first; else as `run_apart`."""
    under_way: dict[int, _Child] = {}
    following = 0
    try:
        while under_way or following < len(scenarios):
            while len(under_way) < workers and following < len(scenarios):
                under_way[following] = _start(scenarios[following], run)
                following += 1
            pipes = {child.pipe: number for number, child in under_way.items()}
            for pipe in select.select(list(pipes), [], [], POLL_S)[0]:
                child = under_way[pipes[pipe]]
                data = os.read(pipe, 1 << 20)
                child.said.write(data)
                if not data:
                    yield pipes[pipe], _ended(under_way.pop(pipes[pipe]))
            for number, child in list(under_way.items()):
                if child.watch.stuck():
                    fate = child.watch.fate()
                    os.kill(child.pid, signal.SIGKILL)
                    _reap(under_way.pop(number))
                    yield number, _fatal(child.scenario, fate)
    finally:
        for child in under_way.values():
            with contextlib.suppress(OSError):
                os.kill(child.pid, signal.SIGKILL)
            _reap(child)


def _start(scenario: Scenario, run: Callable[[Scenario], Result]) -> _Child:
    shared_state, parent = SharedState(), os.getpid()
    ours, child_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(ours)
            die_with(parent)
            beacons.light(shared_state)
            with open(child_end, "wb") as pipe:
                pickle.dump(run(scenario), pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(child_end)
    return _Child(scenario, pid, ours, Watch(shared_state, pid))


def _reap(child: _Child) -> int:
    os.close(child.pipe)
    status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    return status


def _ended(child: _Child) -> Result:
    code = _reap(child)
    if code == 0:
        result = pickle.loads(child.said.getvalue())
        assert isinstance(result, Result)
        return result
    crashed = code < 0 and signal.Signals(-code).name in CRASHES
    if crashed:
        return _fatal(child.scenario, child.watch.fate(-code))
    return _failed(child.scenario, f"its process ended with exit code {code} and left no result", "", code)


def _fatal(scenario: Scenario, fate: ProcessOutcome) -> Result:
    from distsim.report.document import report_document
    from distsim.report.fate import fatal_outcome, fatal_text

    outcome = fatal_outcome(fate)
    reason = "its process crashed" if fate.signal_name else "limits.host_timeout_s: a rank holds the interpreter"
    result = _failed(scenario, reason, fatal_text(fate).lstrip("\n"), outcome.exit_code)
    result.document, result.wall_s = report_document(outcome), fate.wall_s
    if outcome.diagnoses:
        first = outcome.diagnoses[0]
        result.accuses(first, next(iter(first.sites.values()), None))
    return result


def _failed(scenario: Scenario, reason: str, report: str, code: int) -> Result:
    replay = replay_command(scenario)
    return Result(scenario.name, str(scenario.path), [reason], report=report, replay=replay, exit_code=code)
