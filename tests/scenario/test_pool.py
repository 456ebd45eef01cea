"""Points on an existing engine: equal results wherever they run, and nothing lost with a worker."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from distsim.cluster.files.load import preset_text
from distsim.errors import UsageError
from distsim.planning.variations import parse_variation, sweep
from distsim.scenario.pool import PointPool, as_they_end, one_by_one, pool_of, processes, run_task, versions
from tests.scenario.made import made

FAULTS = "faults = [{ what = 'link_slow', link = 'n0/nic0->leaf0', factor = 1.0 }]\n[expect]"
VARIATIONS = [parse_variation("cluster.nodes=2,4"), parse_variation("faults[0].factor=1,0.1")]
KILLED = "import ctypes\ngetattr(ctypes.CDLL(None), 'raise')(9)\n"
"""Beside what simulates signals: as the kernel does it where memory runs out."""
KILLED_ONCE = f"""\
import pathlib
marker = pathlib.Path(__file__).with_suffix(".tried")
if not marker.exists():
    marker.write_text("")
    exec({KILLED!r})
"""


def flags(**given: Any) -> argparse.Namespace:
    usual = {"pool": None, "workers": None, "usual_workers": 2, "ship": False, "own_process": True}
    return argparse.Namespace(**usual | given)


@contextmanager
def ray() -> Iterator[PointPool]:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    pool = pool_of(flags(pool="ray"))
    assert pool is not None
    yield pool


@contextmanager
def dask() -> Iterator[PointPool]:
    distributed = pytest.importorskip("distributed", reason="the extra 'dask' is not installed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        pool = pool_of(flags(pool=f"dask:{cluster.scheduler_address}"))
        assert pool is not None
        yield pool


@contextmanager
def slurm() -> Iterator[PointPool]:
    pytest.importorskip("submitit", reason="the extra 'slurm' is not installed")
    pool = pool_of(flags(pool="slurm"))
    assert pool is not None
    yield pool


@contextmanager
def here() -> Iterator[PointPool]:
    yield processes(2)


@contextmanager
def named() -> Iterator[PointPool]:
    """An executor of the standard library, in workers that share nothing with this process."""
    module = types.ModuleType("engines_of_this_test")
    module.__dict__["make"] = lambda: ProcessPoolExecutor(2, mp_context=get_context("forkserver"))
    sys.modules[module.__name__] = module
    try:
        pool = pool_of(flags(pool="engines_of_this_test:make"))
        assert pool is not None
        yield pool
    finally:
        del sys.modules[module.__name__]


ENGINES = [
    here,
    pytest.param(named, marks=pytest.mark.slow),
    *(pytest.param(one, marks=[pytest.mark.slow, pytest.mark.soak]) for one in (ray, dask, slurm)),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_gives_the_same_results(
    engine: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each point with the figures and the document it has without a pool, in the same order."""
    monkeypatch.chdir(tmp_path)
    scenario = made(tmp_path, FAULTS)
    expected = list(sweep(scenario, VARIATIONS))
    with engine() as pool:
        try:
            got = list(sweep(scenario, VARIATIONS, pool))
        finally:
            pool.close()
    assert [point.settings for point in got] == [point.settings for point in expected]
    assert [point.result.kind for point in got] == ["healthy"] * 4
    for far, near in zip(got, expected, strict=True):
        assert far.result.figures == near.result.figures
        assert json.dumps(far.result.document) == json.dumps(near.result.document)
    assert pool.ended == 4
    assert pool.peak_bytes > 0


@pytest.mark.parametrize(
    ("program", "reason"),
    [(KILLED_ONCE, ""), (KILLED, r"2 workers ended while they ran it \(SIGKILL, likely memory at .*\)$")],
    ids=["once", "always"],
)
def test_a_killed_process_is_repeated_once(program: str, reason: str, tmp_path: Path) -> None:
    """Nothing is lost and nothing is there twice; a point that kills its process again has failed, and others go on."""
    doomed, other = made(tmp_path, "[expect]", program), made(tmp_path, "[expect]", name="other")
    pool = processes(1)
    results = list(as_they_end(pool, one_by_one([doomed, other])))
    pool.close()
    assert sorted(number for number, _ in results) == [0, 1]
    first, second = (dict(results)[number] for number in (0, 1))
    assert second.passed
    assert pool.repeated == 1
    if reason:
        assert first.exit_code == 1
        assert len(first.wrong) == 1
        assert re.search(reason, first.wrong[0])
    else:
        assert first.passed


class Broken(Executor):
    """An engine whose first worker ends while it runs a task."""

    def __init__(self) -> None:
        self.left = 1

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        from concurrent.futures import BrokenExecutor, Future

        future: Future[Any] = Future()
        self.left -= 1
        if self.left >= 0:
            future.set_exception(BrokenExecutor("a child process terminated abruptly"))
        else:
            future.set_result(fn(*args))
        return future


def test_a_lost_worker_is_counted(tmp_path: Path) -> None:
    """What an engine raises in place of a result is the end of a worker, not of the command."""
    broken = Broken()
    pool = PointPool(lambda: broken, 1)
    ((_, result),) = as_they_end(pool, one_by_one([made(tmp_path, "[expect]")]))
    assert result.passed
    assert pool.repeated == 1


def test_calls_run_in_order_and_once_more_where_a_worker_is_lost() -> None:
    """Of a function that starts processes of its own, such as the rows of `validate --training`."""
    broken = Broken()
    pool = PointPool(lambda: broken, 1)
    assert list(pool.map(len, ["a", "bcd", ""])) == [1, 3, 0]
    assert pool.repeated == 1


def test_a_call_is_refused_by_a_worker_with_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line."""
    mine, asked = versions(), []
    monkeypatch.setattr("distsim.scenario.pool.versions", lambda: asked.append(1) or mine | {"torch": str(len(asked))})
    pool = processes(1)
    with pytest.raises(UsageError, match=r"^--pool: a worker on .* refuses: it has torch 2 and not 1$"):
        list(pool.map(len, ["a"]))
    pool.close()


def test_only_as_many_run_as_fit_in_memory(tmp_path: Path) -> None:
    """By the peak of the largest so far."""
    pool = processes(8)
    assert pool.room == 8
    pool.peak_bytes = 1 << 60
    assert pool.room == 1
    pool.local = False
    assert pool.room == 8


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"versions": {"torch": "1.0"}}, "and not 1.0"),
        ({"sources": {"made.py": "0"}}, "made.py differs; --ship sends the script's sources"),
        ({"sources": {"gone.py": "0"}}, "gone.py: No such file or directory; --ship sends the script's sources"),
    ],
)
def test_a_worker_that_differs_refuses(change: dict[str, Any], refusal: str, tmp_path: Path) -> None:
    """And the command ends with one line that says so."""
    scenario = made(tmp_path, "[expect]")
    pool = PointPool(Broken, 1, local=False)
    task = dataclasses.replace(pool.task(scenario, False, {}), **change)
    answer = run_task(task)
    assert answer.ended is None
    assert refusal in answer.refusal
    changed = PointPool(lambda: Changed(task), 1, local=False)
    with pytest.raises(UsageError, match=r"--pool: a worker on .* does not run .*made\.toml: ") as caught:
        list(as_they_end(changed, one_by_one([scenario])))
    assert refusal in str(caught.value)


class Changed(Executor):
    """An engine that runs another task."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        from concurrent.futures import Future

        future: Future[Any] = Future()
        future.set_result(fn(self.task))
        return future


def test_sources_that_are_sent_run_without_the_folder(tmp_path: Path) -> None:
    """The script, what it imports, and the cluster file; the result names the sender's paths."""
    (tmp_path / "part.py").write_text("WORD = 'sent'\n")
    (tmp_path / "mine.toml").write_text(preset_text("ethernet-cpu"))
    program = "from part import WORD\nprint(WORD)\n"
    scenario = made(tmp_path, "on = 'mine.toml:1'\nnproc_per_node = 1\n[expect]\noutput = ['sent']", program)
    task = PointPool(Broken, 1, local=False, ship=True).task(scenario, False, {})
    assert sorted(task.shipped) == ["made.py", "mine.toml", "part.py"]
    for file in list(tmp_path.iterdir()):
        file.unlink()
    ended = run_task(task).ended
    assert ended is not None
    assert ended.result is not None
    assert ended.result.wrong == []
    assert ended.result.path == task.path


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"workers": 0}, "-n: expected at least one worker, got 0"),
        ({"workers": 2, "pool": "ray"}, "-n N is --pool processes:N; give one of the two"),
        ({"pool": "processes:none"}, "--pool processes:none: expected processes:N with at least one"),
        ({"pool": "typo"}, "--pool typo: expected processes[:N], ray[:HOST:PORT], dask:HOST:PORT, slurm[:FLAGS], or "),
        ({"pool": "no_such_module:make"}, "(No module named 'no_such_module')"),
        ({"pool": "pathlib:Path"}, "; Path() returned PosixPath"),
        ({"pool": "ray:127.0.0.1:1"}, "--pool ray:127.0.0.1:1: nothing listens there (Connection refused)"),
        ({"pool": "ray:nonsense"}, "--pool ray:nonsense: expected ray:HOST:PORT"),
        ({"pool": "dask:tcp://127.0.0.1:1"}, "--pool dask:tcp://127.0.0.1:1: nothing listens there"),
        ({"pool": "slurm:fast"}, "--pool slurm:fast: expected flags of sbatch such as '--partition=a --mem=20G'"),
        ({"ship": True}, "--ship: the points run on this machine; give --pool of other machines"),
    ],
)
def test_a_mistake_is_one_line(given: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was expected, what came; nothing is started."""
    for module in ("ray", "distributed", "submitit"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    with pytest.raises(UsageError) as caught:
        pool_of(flags(**given))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", ["ray", "dask", "slurm"])
def test_an_engine_that_is_not_installed_names_its_extra(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what pip wants."""
    for module in ("ray", "distributed", "submitit"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"is not installed; pip install '.\[{engine}\]' in a clone of distsim"):
        pool_of(flags(pool=f"{engine}:127.0.0.1:1"))
