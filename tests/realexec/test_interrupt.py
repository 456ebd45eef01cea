"""Ctrl-C on a real job."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HERE

ENDLESS = """
import torch
import torch.distributed as dist
from pathlib import Path

dist.init_process_group("gloo")
t = torch.ones(4)
for step in range(10**9):
    dist.all_reduce(t)
    if step == 100 and dist.get_rank() == 0:
        Path("ready").write_text("now")
"""


@pytest.mark.slow
def test_ctrl_c_blames_nobody_and_says_where_the_ranks_were(tmp_path: Path) -> None:
    """An interrupt of the whole job, as a terminal sends it, is no rank's exception: each rank's call is shown."""
    (tmp_path / "train.py").write_text(ENDLESS)
    os.mkfifo(tmp_path / "ready")
    ready = os.open(tmp_path / "ready", os.O_RDONLY | os.O_NONBLOCK)
    command = [sys.executable, "-m", "distsim", "run", "--on", "gloo", "--nproc-per-node", "2", "train.py"]
    job = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(HERE.parents[1]), OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert select.select([ready], [], [], 90)[0]
    os.close(ready)
    os.killpg(job.pid, signal.SIGINT)
    said, _ = job.communicate(timeout=60)
    places = [line for line in said[said.index("INTERRUPTED") :].splitlines() if line.startswith("  Rank")]
    assert places, said  # one line, or two where a rank is a call ahead
    assert all("all_reduce #" in place and "train.py:9" in place for place in places), said
    assert "rank raised" not in said
    assert job.returncode == 130, said
