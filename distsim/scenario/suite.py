"""Runs many scenarios: selects them, runs several at a time, and yields their results in order."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Sequence

from distsim.errors import UsageError
from distsim.scenario.expect.result import Result
from distsim.scenario.file.load import BadFile, Scenario, program_text
from distsim.scenario.pool import PointPool, as_they_end, one_by_one
from distsim.text.untrusted_input import brief

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
    scenarios: Sequence[Scenario], pool: PointPool | None = None, update_baselines: bool = False, picture: bool = False
) -> Iterator[Result]:
    """Yield results in the order of *scenarios* as soon as they are available.

    With a *pool*, each scenario has a process of its own; without, they run here, one by one.
    """
    import_for(scenarios)
    results: dict[int, Result] = {}
    waiting = 0
    for number, result in as_they_end(pool, one_by_one(scenarios), update_baseline=update_baselines, picture=picture):
        results[number] = result
        while waiting in results:
            yield results.pop(waiting)
            waiting += 1


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
