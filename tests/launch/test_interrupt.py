"""Ctrl-C on a real job."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
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


@pytest.mark.soak
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
        env=dict(os.environ, PYTHONPATH=str(HERE.parent), OMP_NUM_THREADS="1"),
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


STUCK = """
import queue
import torch
import torch.distributed as dist
from pathlib import Path

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 0:
    Path("ready").write_text("now")
queue.Queue().get()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.soak) for n in (signal.SIGINT, signal.SIGQUIT))]
)
def test_a_stuck_job_that_is_ended_leaves_the_stacks_of_all_ranks(number: signal.Signals, tmp_path: Path) -> None:
    """A time limit ends a job before the guard does: both the job and `distsim diagnose` show where its ranks were."""
    (tmp_path / "train.py").write_text(STUCK)
    os.mkfifo(tmp_path / "ready")
    ready = os.open(tmp_path / "ready", os.O_RDONLY | os.O_NONBLOCK)
    program = [sys.executable, "-m", "distsim"]
    environ = dict(os.environ, PYTHONPATH=str(HERE.parent), OMP_NUM_THREADS="1")
    job = subprocess.Popen(
        [*program, "run", "--on", "gloo", "--nproc-per-node", "2", "--rings", "rings", "train.py"],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert select.select([ready], [], [], 90)[0]
    os.close(ready)
    job.send_signal(number)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 128 + number, said
    again = subprocess.run(
        [*program, "diagnose", "rings"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert again.returncode == 2
    assert "killed" not in again.stdout
    for text in (said[said.index("INTERRUPTED") :], again.stdout):
        assert "Ranks 0,1 were at train.py:11" in text, text
        assert "queue.py" in text, text


HOLDS_THE_MONITOR = """
import os
import signal
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
with open(os.path.join(os.environ["DISTSIM_DIR"], "monitor..lock")) as file:
    os.kill(int(file.read()), signal.SIGSTOP)
"""


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_very_end_is_one_line(number: signal.Signals, tmp_path: Path) -> None:
    """The launcher waits for the monitor's last word: it ends at once, with the monitor, and no traceback of ours."""
    (tmp_path / "train.py").write_text(HOLDS_THE_MONITOR)
    command = [sys.executable, "-m", "distsim", "run", "--on", "gloo", "--nproc-per-node", "1", "--rings", "rings"]
    job = subprocess.Popen(
        [*command, "train.py"],
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(HERE.parent), OMP_NUM_THREADS="1"),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    waits_for(tmp_path / "rings" / "done.json")
    monitor = int((tmp_path / "rings" / "monitor..lock").read_text())
    job.send_signal(number)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 128 + number, said
    assert "Traceback" not in said
    assert f"distsim: {number.name} before the monitor's verdict" in said
    assert not Path(f"/proc/{monitor}").exists()


def waits_for(path: Path) -> None:
    """Until a file is there; fails after a minute and a half."""
    deadline = time.monotonic() + 90
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)
