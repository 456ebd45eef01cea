"""Runs many scenarios: selects them, runs several at a time, and prints a line for each."""

from __future__ import annotations

import importlib
import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from distsim.errors import UsageError
from distsim.scenario.expect.result import NOT_RUN, Result
from distsim.scenario.file.load import BadFile, Scenario, check
from distsim.scenario.run import run_scenario
from distsim.scenario.subprocess_runner import run_apart
from distsim.text.untrusted_input import brief

__all__ = ["import_for", "matching", "run_one", "run_suite", "run_there"]

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
    """Yield results in the order of *scenarios* as soon as they are there.

    With *apart*, each scenario has a process of its own (subprocess_runner.py); this process must then be able to
    fork.
    """
    if apart:
        import_for(scenarios)
        run = partial(run_scenario, update_baseline=update_baselines, picture=picture)
        yield from run_apart(scenarios, workers, run)
        return
    if workers < 2 or len(scenarios) < 2:
        import_for(scenarios)
        for scenario in scenarios:
            yield run_scenario(scenario, update_baseline=update_baselines, picture=picture)
        return
    # Fresh processes: a simulation swaps what a process has only once, so two cannot share one.
    context = multiprocessing.get_context("spawn")
    number = min(workers, len(scenarios))
    needed = _imports(scenarios)
    with ProcessPoolExecutor(number, mp_context=context, initializer=_prepare, initargs=(needed,)) as pool:
        jobs = [pool.submit(run_one, s.path, s.data, update_baselines, picture) for s in scenarios]
        for job in jobs:
            yield job.result()


def _imports(scenarios: Sequence[Scenario]) -> list[str]:
    """Return slow modules that some of *scenarios* import, so that they are imported once before the first scenario
    runs.
    """
    simulated = [s for s in scenarios if s.spec.backend == "sim"]
    files = {s.file for s in simulated if s.file is not None and s.file.is_file()}
    data_parallel = any(b"torch.nn.parallel" in file.read_bytes() for file in files)
    # DistributedDataParallel's constructor imports torch._dynamo
    return ["distsim.sim"] * bool(simulated) + ["torch._dynamo"] * data_parallel


def import_for(scenarios: Sequence[Scenario]) -> None:
    """Import what some of *scenarios* will, before processes are forked for them."""
    _import(_imports(scenarios))


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def _prepare(modules: Sequence[str]) -> None:
    _import(modules)
    multiprocessing.set_start_method(None, force=True)  # a worker has one, a program's first process has not


def run_one(path: object, data: dict[str, object], update: bool, picture: bool = False) -> Result:
    """One scenario in a worker, from plain data; what no longer fits (a program deleted meanwhile) is its own error."""
    path = Path(str(path))
    try:
        return run_there(path, data, update, picture)
    except BadFile as error:
        return Result(error.name, str(path), error.faults, kind=NOT_RUN)


def run_there(path: object, data: dict[str, object], update: bool, picture: bool = False) -> Result:
    """One scenario on a machine that may not have what it needs: then `BadFile`."""
    return run_scenario(check(data, Path(str(path))), update_baseline=update, picture=picture)
