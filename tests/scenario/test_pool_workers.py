"""Real engines whose workers are killed, stopped, or have another torch: nothing is lost, and nothing runs twice."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distsim.errors import UsageError
from distsim.scenario.pool import as_they_end, one_by_one, versions
from tests.scenario.made import STEPS, made
from tests.scenario.test_pool import dask, named, ray, slurm

pytestmark = [pytest.mark.slow, pytest.mark.soak]

TO_ITS_WORKER = """\
import ctypes, pathlib
marker, libc = pathlib.Path({marker!r}), ctypes.CDLL(None)
if not marker.exists():
    marker.write_text(str(libc.getppid()))
    libc.kill(libc.getppid(), {number})
"""
"""Sends a signal to the engine's worker, whose child simulates: once, beside what simulates signals and processes."""
ENGINES = [named, ray, dask, slurm]


def striking(folder: Path, number: signal.Signals) -> tuple[str, Path]:
    """Return a program that sends a signal to its worker at its first run, and the file with the worker's process."""
    marker = folder / "struck"
    return TO_ITS_WORKER.format(marker=str(marker), number=int(number)) + STEPS, marker


@pytest.mark.parametrize("engine", ENGINES)
def test_a_worker_that_is_killed_loses_nothing(
    engine: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its point runs once more, by the pool or by the engine itself; the others once."""
    monkeypatch.chdir(tmp_path)
    program, marker = striking(tmp_path, signal.SIGKILL)
    scenarios = [made(tmp_path, "[expect]", program)]
    scenarios += [made(tmp_path, "[expect]", name=f"other{number}") for number in range(3)]
    with engine() as pool:
        try:
            results = list(as_they_end(pool, one_by_one(scenarios)))
        finally:
            pool.close()
    assert marker.exists()
    assert sorted(number for number, _ in results) == [0, 1, 2, 3]
    assert [result.wrong for _, result in results] == [[]] * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_worker_that_is_stopped_holds_up_its_own_point_only(
    engine: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others end meanwhile; it goes on when it is continued."""
    monkeypatch.chdir(tmp_path)
    program, marker = striking(tmp_path, signal.SIGSTOP)
    scenarios = [made(tmp_path, "[expect]", program)]
    scenarios += [made(tmp_path, "[expect]", name=f"other{number}") for number in range(3)]
    ended: list[int] = []
    with engine() as pool:
        try:
            for number, result in as_they_end(pool, one_by_one(scenarios)):
                assert result.wrong == []
                ended.append(number)
                if len(ended) == 3:
                    os.kill(int(marker.read_text()), signal.SIGCONT)
        finally:
            pool.close()
    assert sorted(ended[:3]) == [1, 2, 3]
    assert ended[3:] == [0]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_worker_with_another_torch_refuses(
    engine: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line; the worker compares with its own release."""
    monkeypatch.chdir(tmp_path)
    mine = versions()
    monkeypatch.setattr("distsim.scenario.pool.versions", lambda: mine | {"torch": "1.0"})
    with engine() as pool:
        try:
            with pytest.raises(UsageError, match=rf"it has torch {mine['torch']} and not 1\.0".replace("+", r"\+")):
                list(as_they_end(pool, one_by_one([made(tmp_path, "[expect]")])))
        finally:
            pool.close()


def test_points_on_mpi(tmp_path: Path) -> None:
    """By mpi4py's own executor, whose workers MPI starts: the same figures as here."""
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no MPI here: {str(error).splitlines()[0]}")
    made(tmp_path, "[expect]")
    rows = []
    for words in (["-n", "1"], ["--pool", "mpi4py.futures:MPIPoolExecutor"]):
        command = [sys.executable, "-m", "distsim", "sweep", "made.toml", "--vary", "cluster.nodes=2,4", *words]
        done = subprocess.run(
            [*command, "--csv", "points.csv"],
            cwd=tmp_path,
            env=os.environ | {"MPI4PY_FUTURES_MAX_WORKERS": "2"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        with (tmp_path / "points.csv").open() as file:
            rows.append([{k: v for k, v in row.items() if not k.startswith("wall")} for row in csv.DictReader(file)])
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2
