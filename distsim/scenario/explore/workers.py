"""Runs of an exploration on the workers of a pool: each of them takes many, and only the choices travel."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import chdir, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from typing import Any

from distsim.errors import DistsimError, UsageError
from distsim.scenario.explore.search import Attempt, Ran
from distsim.scenario.file.load import Scenario
from distsim.scenario.pool import PointPool, opened, received
from distsim.scenario.suite import import_for
from distsim.sim.kernel.chooser import Orders
from distsim.watchdog.process import die_with

QUEUE = 2
"""Batches per worker that are under way, so that none waits for the next one."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Some runs of a scenario."""

    task: bytes
    """The scenario as data: a pickled PointTask."""
    folder: str
    """Working folder of the command, from which lines are named."""
    orders: Sequence[Orders]


@contextmanager
def warmed(pool: PointPool | None, scenarios: Sequence[Scenario]) -> Iterator[PointPool | None]:
    """Return workers that stay for all explorations of a command: those of *pool*, or processes that are forked now.

    They are forked before this process has simulated anything, but after it has imported what *scenarios* will.
    """
    if pool is None or (pool.local and pool.width == 1) or not scenarios:
        yield None
        return
    if pool.local:
        import_for(scenarios)
        context = get_context("fork")
        pool = PointPool(partial(ProcessPoolExecutor, pool.width, context, _begin, (os.getpid(),)), pool.width)
    with opened(pool):
        pool.call(len, ()).result()
        yield pool


def _begin(parent: int) -> None:
    """Prepare a process that is forked: it ends with its parent, which alone answers Ctrl-C."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class ScenarioWorkers:
    """Workers for the runs of one scenario.

    Args:
        pool: Where they are (`warmed`).
        scenario: What they run.
        attempt_of: Returns the function that runs it once in some order. It must be importable.
    """

    def __init__(self, pool: PointPool, scenario: Scenario, attempt_of: Callable[[Scenario], Attempt]) -> None:
        self._pool, self._run = pool, partial(run_batch, attempt_of)
        self._task = pickle.dumps(pool.task(scenario, quiet=True, options={}))
        self._batches: dict[Future[Any], _Batch] = {}
        self.queue = QUEUE * pool.width

    def submit(self, batch: Sequence[Orders]) -> Future[Any]:
        """Begin some runs in a worker."""
        work = _Batch(self._task, os.getcwd(), batch)
        future = self._pool.call(self._run, work)
        self._batches[future] = work
        return future

    def collect(self, future: Future[Any]) -> list[Ran]:
        """Return the results of a batch. If its worker was lost, another one runs it.

        Raises:
            UsageError: A worker refuses, or a second one was lost.
        """
        batch = self._batches.pop(future)
        try:
            ran, refusal = future.result()
        except DistsimError:
            raise
        except Exception:
            self._pool.repeated += 1
            try:
                ran, refusal = self._pool.call(self._run, batch).result()
            except Exception as error:
                raise UsageError(f"--pool: two workers ended while they ran one batch ({error})") from None
        if refusal or isinstance(ran, str):
            raise UsageError(f"--pool: a worker does not run it: {refusal or ran}")
        return list(ran)


@lru_cache(4)
def _received(task: bytes) -> tuple[Scenario | str, Any]:
    """Return the scenario, and the folder that lives as long as it."""
    folder = tempfile.TemporaryDirectory(prefix="distsim-")
    return received(pickle.loads(task), folder.name), folder


def run_batch(attempt_of: Callable[[Scenario], Attempt], batch: _Batch) -> list[Ran] | str:
    """Run the orders of *batch* in this worker; return their results, or why the worker refuses."""
    scenario, _ = _received(batch.task)
    if isinstance(scenario, str):
        return scenario
    if not os.path.isdir(batch.folder):
        return f"{batch.folder}: no such folder"
    attempt = attempt_of(scenario)
    ended: list[Ran] = []
    with chdir(batch.folder):
        for orders in batch.orders:
            ran = attempt(orders)
            ended.append((orders, ran if ran.failed else replace(ran, payload=None)))
    return ended
