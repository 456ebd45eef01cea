"""Real jobs that are stuck without any rank waiting for another in a call."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Zygote

from distsim.debug.records.kinds import Kind
from distsim.sim.run import RunRequest, run_program

BEGIN = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(2)
for step in range(3):
    dist.all_reduce(t)
    if step == 1:
        """
STUCK = {
    "queue": "import queue; queue.Queue().get()",
    "sleep": "import time; time.sleep(1000)",
    "subprocess": "import subprocess; subprocess.run(['sleep', '30'])",
    "gil": "import re; re.match(r'(a+)+$', 'a' * 40 + 'b')",
    "input": "import os; os.read(os.pipe()[0], 1)",
    "loop": "while True: pass",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", [way if way == "queue" else pytest.param(way, marks=pytest.mark.soak) for way in STUCK])
def test_ranks_that_are_all_stuck_on_their_hosts_are_a_hang(
    way: str, zygote: Zygote, folder: Path, tmp_path: Path
) -> None:
    """A warning first; at --hang-after host_stuck, all ranks, the line, and the job is ended."""
    program = tmp_path / "stuck.py"
    program.write_text(BEGIN + STUCK[way] + "\n")
    result = zygote.run(program, 2, directory=folder, hang_after_s=3.0)
    (hang,) = result.diagnoses
    assert (hang.kind, hang.culprits, hang.exit_code) == (Kind.HOST_STUCK, (0, 1), 3)
    assert {site.line for site in hang.sites.values()} == {7}
    assert (folder / "aborted.json").exists()


def test_simulated_ranks_that_are_all_stuck_are_one_hang(tmp_path: Path) -> None:
    """The simulator says at once what gloo says at --hang-after."""
    program = tmp_path / "stuck.py"
    program.write_text(BEGIN + STUCK["queue"] + "\n")
    (hang,) = run_program(RunRequest(str(program), on="ethernet-cpu:1", nproc_per_node=2)).diagnoses
    assert (hang.kind, hang.culprits, hang.exit_code) == (Kind.HOST_STUCK, (0, 1), 3)
    assert {site.line for site in hang.sites.values()} == {7}


WORKER = """\
import ctypes, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
dist.init_process_group("gloo")
class Shared(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: stuck in C++, it would outlive its rank
        seed = torch.tensor([i])
        dist.broadcast(seed, src=0)
        return seed
for batch in DataLoader(Shared(), num_workers=1{context}):
    dist.all_reduce(batch)
"""


@pytest.mark.slow
def test_a_collective_in_a_forked_worker_is_reported_by_name(zygote: Zygote, folder: Path, tmp_path: Path) -> None:
    """At once as a warning, at --hang-after as a hang: the groups of a rank do not work in its forked children."""
    program = tmp_path / "worker.py"
    program.write_text(WORKER.format(context=""))
    result = zygote.run(program, 2, directory=folder, hang_after_s=3.0)
    (hang,) = result.diagnoses
    assert (hang.kind, hang.culprits, hang.exit_code) == (Kind.HOST_STUCK, (0, 1), 3)
    assert {site.line for site in hang.sites.values()} == {10}
    assert "called broadcast" in hang.explanation
    assert result.report.count("called broadcast") >= 2  # type: ignore[attr-defined]


def test_a_collective_in_a_simulated_worker_is_reported_by_name(tmp_path: Path) -> None:
    """The simulator runs a loader's workers inside the rank, and does not let them use its groups either."""
    program = tmp_path / "worker.py"
    program.write_text(WORKER.format(context=""))
    (hang,) = run_program(RunRequest(str(program), on="ethernet-cpu:1", nproc_per_node=2)).diagnoses
    assert (hang.kind, hang.culprits, hang.exit_code) == (Kind.HOST_STUCK, (0, 1), 3)
    assert {site.line for site in hang.sites.values()} == {10}
    assert "called broadcast" in hang.explanation


def test_a_collective_in_a_spawned_worker_has_no_group(tmp_path: Path) -> None:
    """A process that is not forked has joined nothing: torch raises, and so does the simulator."""
    program = tmp_path / "worker.py"
    program.write_text(WORKER.format(context=', multiprocessing_context="spawn"'))
    outcome = run_program(RunRequest(str(program), on="ethernet-cpu:1", nproc_per_node=2))
    assert outcome.exit_code == 1
    assert "has not been initialized" in str(outcome.failures[0])


APART = """\
import os, torch.distributed as dist
if os.environ["RANK"] == "1":
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 7)
dist.init_process_group("gloo")
"""


@pytest.mark.slow
def test_a_rank_that_calls_another_port_is_named(zygote: Zygote, folder: Path, tmp_path: Path) -> None:
    """With both addresses, long before torch gives up."""
    program = tmp_path / "subprocess_runner.py"
    program.write_text(APART)
    result = zygote.run(program, 3, directory=folder, hang_after_s=4.0)
    (hang,) = result.diagnoses
    assert (hang.kind, hang.culprits, hang.exit_code) == (Kind.NEVER_JOINED, (1,), 3)
    assert hang.explanation.count("127.0.0.1:") == 2


def test_a_simulated_rank_that_calls_another_port_is_named(tmp_path: Path) -> None:
    """Not rank 0, which only gives up first."""
    program = tmp_path / "subprocess_runner.py"
    program.write_text(APART)
    outcome = run_program(RunRequest(str(program), on="ethernet-cpu:1", nproc_per_node=3))
    (hang,) = outcome.diagnoses
    assert (hang.kind, hang.culprits, hang.exit_code) == (Kind.NEVER_JOINED, (1,), 3)
