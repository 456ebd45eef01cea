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


@pytest.mark.slow
def test_a_pool_that_keeps_a_process_alive_is_named_by_its_line(tmp_path: Path) -> None:
    """Its worker has no frame of the program; the script is through, and the launcher waits."""
    (tmp_path / "train.py").write_text(POOL)
    done = distsim_run("--hang-after", "4", "train.py", cwd=tmp_path)
    report = " ".join(done.stderr.split())
    assert done.returncode == 3, done.stderr
    assert "HANG host stuck rank 1 train.py:10" in report
    assert "Rank 1 has finished its program, but the process lives" in report
    assert "a worker of a pool (made at train.py:10)" in report
