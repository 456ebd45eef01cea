"""Explorations on the workers of a pool: the same classes and the same failing order as in one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from distsim.errors import UsageError
from distsim.scenario import load_scenario
from distsim.scenario.explore import search
from distsim.scenario.explore.budget import Budget
from distsim.scenario.explore.scenarios import ExploredScenario, explore_scenario
from distsim.scenario.explore.workers import warmed
from distsim.scenario.pool import PointPool, PointTask, processes
from tests.scenario.made import RACE, made

ORDERS = Path(__file__).parents[2] / "scenarios" / "orders"


def explored(scenario: Any, pool: PointPool | None) -> ExploredScenario:
    return explore_scenario(scenario, Budget(), scenario.spec.explore_faults, lambda _: None, pool)


def figures(done: ExploredScenario) -> tuple[Any, ...]:
    failing = done.explored.failing
    assert failing is not None
    return done.explored.classes, done.explored.failing_classes, failing.words, failing.replay, done.result.wrong


def forkserver() -> PointPool:
    return PointPool(partial(ProcessPoolExecutor, 2, get_context("forkserver")), 2, local=False)


@pytest.mark.slow
@pytest.mark.parametrize("pool_of", [partial(processes, 2), forkserver], ids=["forks", "strangers"])
@pytest.mark.parametrize("name", ["two_updates_broken", "lease_broken"])
def test_workers_find_what_one_process_finds(
    pool_of: Callable[[], PointPool], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With store operations and limits as choices, in forks and in processes that share nothing."""
    monkeypatch.setattr(search, "FURTHER_S", 300.0)  # strangers begin by importing torch
    scenario = load_scenario(ORDERS / f"{name}.toml")
    with warmed(pool_of(), [scenario]) as workers:
        assert workers is not None
        assert figures(explored(scenario, workers)) == figures(explored(scenario, None))


class OneLost(Executor):
    """Runs in this process; of the tasks with one of *lost* as their number, the worker ends."""

    def __init__(self, lost: set[int]) -> None:
        self.lost, self.number = lost, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.number += 1
        if self.number in self.lost:
            future.set_exception(BrokenExecutor("a child process terminated abruptly"))
        else:
            future.set_result(fn(*args))
        return future


def test_runs_of_a_lost_worker_are_repeated_once(tmp_path: Path) -> None:
    """No class is lost or counted twice; a second loss ends the exploration in one line."""
    scenario = made(tmp_path, "[expect]", RACE)
    pool = PointPool(partial(OneLost, {2}), 2, local=False)
    done = explored(scenario, pool)
    assert (done.explored.headline, pool.repeated) == ("2 of 6 classes fail", 1)
    with pytest.raises(UsageError, match=r"^--pool: two workers ended while they ran one batch \(a child process"):
        explored(scenario, PointPool(partial(OneLost, {1, 2, 3, 4}), 2, local=False))


def test_a_worker_without_the_program_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line that says what to do."""
    scenario = made(tmp_path, "[expect]", RACE)
    pool = PointPool(partial(OneLost, set()), 2, local=False)
    task = pool.task

    def other(*args: Any, **options: Any) -> PointTask:
        return replace(task(*args, **options), sources={"made.py": "0"})

    monkeypatch.setattr(pool, "task", other)
    with pytest.raises(UsageError, match=r"^--pool: a worker does not run it: its .*made\.py differs"):
        explored(scenario, pool)
