"""Hung jobs that are ended from outside: the hang is the verdict, and not the end. Jobs that do not end at all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from jobs import distsim_run

from tests.cases.corpus import Case
from tools.benchmarks.job_ends import end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("host/all_wait", "srun"),
        ("circles/async_cycle", "sigkill"),
        ("host/holds_gil", "torchrun"),
        *(
            pytest.param(*pair, marks=pytest.mark.soak)
            for pair in (
                ("missing/future", "ctrl-c"),
                ("messages/pipe_middle", "distsim"),
                ("host/all_wait", "torchrun"),
            )
        ),
    ],
)
def test_the_cause_is_the_hang(name: str, launcher: str) -> None:
    """For the job's own report, whose monitor gets the signal as well, and for `distsim diagnose`."""
    result = end(Case.named(name), launcher, random.Random(1), show=True)
    assert result is not None
    is_right, line = result
    assert is_right, line


POOL = """
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
pool = ThreadPoolExecutor(1)
if dist.get_rank() == 1:
    pool.submit(time.sleep, 1000)
dist.destroy_process_group()
"""


CHILD = """
import multiprocessing

import torch
import torch.distributed as dist


def serve():
    multiprocessing.parent_process().join()


dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    multiprocessing.get_context("fork").Process(target=serve).start()
dist.destroy_process_group()
"""

HANDLERS = """
import atexit, os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
atexit.register(lambda: dist.all_reduce(torch.ones(1)))
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "parts"),
    [
        pytest.param(
            POOL,
            (
                "HANG host stuck rank 1 train.py:10",
                "Rank 1 has finished its program, but the process lives",
                "a worker of a pool (made at train.py:10)",
            ),
            id="a pool's worker without a frame of the program",
        ),
        pytest.param(
            CHILD,
            ("HANG host stuck rank 1", "Python waits for child processes", "next: End the child processes"),
            id="a child process",
        ),
        pytest.param(
            HANDLERS,
            ("HANG rank exited rank 1", "Rank 0 made all_reduce at train.py:8 in an exit handler"),
            id="calls of exit handlers fail, and Python goes on",
        ),
    ],
)
def test_what_comes_after_the_script_is_reported(program: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    """The script is through, the process is not, or what it does at its end fails."""
    (tmp_path / "train.py").write_text(program)
    done = distsim_run("--hang-after", "4", "train.py", cwd=tmp_path)
    report = " ".join(done.stderr.split())
    assert done.returncode == 3, done.stderr
    assert [part for part in parts if part not in report] == [], report
