"""Runs many scenarios: selects them, runs several at a time, and prints a line for each.

Each scenario may have a process of its own under the watchdog, so that a hang or crash affects only itself.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import re
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from distsim.errors import UsageError
from distsim.scenario.expect.result import Result, replay_command
from distsim.scenario.file.load import BadFile, Scenario, program_text
from distsim.scenario.run import run_scenario
from distsim.text.untrusted_input import brief
from distsim.watchdog import shared_state as beacons
from distsim.watchdog.process import CRASHES, POLL_S, Watch, die_with
from distsim.watchdog.shared_state import ProcessOutcome, SharedState


@dataclass
class _Child:
    """One scenario that is running in a child process."""

    scenario: Scenario
    pid: int
    pipe: int
    watch: Watch
    output: io.BytesIO = field(default_factory=io.BytesIO)


def run_apart(scenarios: Sequence[Scenario], workers: int, run: Callable[[Scenario], Result]) -> Iterator[Result]:
    """Run each scenario in a process of its own and yield the results in the order of *scenarios*.

    At most *workers* run at a time. The process must be able to fork (`process.can_watch`), and must already have
    imported what the scenarios need.
    """
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
    """Yield (index, result) of each scenario as soon as it ends; otherwise like `run_apart`."""
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
                child.output.write(data)
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
        result = pickle.loads(child.output.getvalue())
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


_TOKEN = re.compile(r"\s*(\(|\)|[^\s()]+)")


def matching(expression: str | None) -> Callable[[Scenario | BadFile], bool]:
    """Return a test for `-k EXPRESSION`: parts of a scenario's name with and, or, not and brackets.

    Long scenarios also match "slow". Of a bad file only the name is known.
    """
    if not expression:
        return lambda _: True
    words: list[str] = []
    parts: list[str] = []
    for token in _TOKEN.findall(expression):
        if token in ("and", "or", "not", "(", ")"):
            parts.append(token)
        else:
            parts.append(f"word({len(words)})")
            words.append(token.lower())
    wrong = UsageError(f"-k {brief(expression)!r}: expected words with and, or, not and brackets")
    try:
        code = compile(" ".join(parts), "-k", "eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise wrong from None

    def meant(scenario: Scenario | BadFile) -> bool:
        name = scenario.name
        if isinstance(scenario, Scenario):
            name += f" {scenario.spec.program} {'slow' if scenario.spec.slow else ''}"
        name = name.lower()
        try:
            return bool(eval(code, {"__builtins__": {}, "word": lambda number: words[number] in name}))
        except TypeError:  # brackets behind a word: Python takes it for a call
            raise wrong from None

    return meant


def run_suite(
    scenarios: Sequence[Scenario],
    workers: int = 1,
    update_baselines: bool = False,
    apart: bool = False,
    picture: bool = False,
) -> Iterator[Result]:
    """Yield results in the order of *scenarios* as soon as they are available.

    With *apart*, each scenario has a process of its own, *workers* at a time; this process must then be able to fork.
    Else they run here, one by one.
    """
    import_for(scenarios)
    run = partial(run_scenario, update_baseline=update_baselines, picture=picture)
    yield from run_apart(scenarios, workers, run) if apart else map(run, scenarios)


def slow_imports(scenarios: Sequence[Scenario]) -> list[str]:
    """Return slow modules that some of *scenarios* import, so that they are imported once before the first scenario
    runs.
    """
    simulated = [s for s in scenarios if s.spec.backend == "sim"]
    files = {s.file for s in simulated if s.file is not None and s.file.is_file()}
    data_parallel = any("torch.nn.parallel" in program_text(file) for file in files)
    # DistributedDataParallel's constructor imports torch._dynamo
    return ["distsim.sim"] * bool(simulated) + ["torch._dynamo"] * data_parallel


def import_for(scenarios: Sequence[Scenario]) -> None:
    """Import what some of *scenarios* will, before processes are forked for them."""
    for module in slow_imports(scenarios):
        importlib.import_module(module)
