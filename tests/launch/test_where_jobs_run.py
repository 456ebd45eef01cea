"""The guard under launchers of others: tasks of SLURM, pods of a PyTorchJob, torchrun elastic, in a container.

Hosts are network namespaces, as far as these go: what the launchers set is set by hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import HERE, free_port

from distsim.scenario.real.namespaces import Hosts, hosts, missing

WITHOUT = missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(WITHOUT is not None, reason=f"no network namespaces here: {WITHOUT}"),
]
PROGRAM = """
import os
import torch
import torch.distributed as dist

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"]))
t = torch.ones(4)
for _ in range(50):
    dist.all_reduce(t)
if dist.get_rank() == dist.get_world_size() - 1:
    dist.barrier()
else:
    dist.all_reduce(t)
"""
GUARDED = ["-m", "distsim.debug", "--verbose", "train.py"]
TORCHRUN = ["-m", "torch.distributed.run"]


def slurm(node: int, master: str, port: str) -> tuple[dict[str, str], list[str]]:
    """One task a rank: srun says who is who, the script where they meet."""
    place = {"SLURM_PROCID": str(node), "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": str(node)}
    job = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "n[0-1]"}
    return {"MASTER_ADDR": master, "MASTER_PORT": port, **job, **place}, GUARDED


def pytorchjob(node: int, master: str, port: str) -> tuple[dict[str, str], list[str]]:
    """The training operator's variables; the command is torchrun."""
    environ = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(node)}
    environ |= {"PET_MASTER_ADDR": master, "PET_MASTER_PORT": port}
    return environ, [*TORCHRUN, *GUARDED]


def elastic(node: int, master: str, port: str) -> tuple[dict[str, str], list[str]]:
    """A second attempt, which hangs as the first did."""
    flags = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-id", "exp7"]
    flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{master}:{port}"]
    return {}, [*TORCHRUN, *flags, *GUARDED]


def start(job: Hosts, launcher: Any, folder: Path) -> list[subprocess.Popen[bytes]]:
    (folder / "train.py").write_text(PROGRAM)
    port, started = str(free_port()), []
    for node in range(2):
        environ, words = launcher(node, job.addresses[0], port)
        common = {name: value for name, value in os.environ.items() if not name.startswith(("DISTSIM", "SLURM"))}
        common |= {
            "PYTHONPATH": str(HERE.parent),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": job.interface(node),
        }
        common |= {"DISTSIM_DIR": str(folder / f"rings{node}"), "DISTSIM_REPORT": f"{folder}/reports/"}
        common |= {"DISTSIM_ON_HANG": "abort", "DISTSIM_EVENTS": str(folder / "events")}
        with (folder / f"out{node}").open("wb") as out:
            started.append(
                subprocess.Popen(
                    [*job.enter(node), sys.executable, *words],
                    env=common | environ,
                    cwd=folder,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
    return started


@pytest.mark.parametrize(
    ("launcher", "name", "attempts"),
    [
        pytest.param(slurm, "slurm-77.0", 1, id="slurm"),
        pytest.param(pytorchjob, "", 1, id="pytorchjob", marks=pytest.mark.soak),
        pytest.param(elastic, "exp7", 2, id="elastic", marks=pytest.mark.soak),
    ],
)
def test_the_report_is_in_one_known_place(launcher: Any, name: str, attempts: int, tmp_path: Path) -> None:
    """One for both hosts, whose monitors meet at each attempt; every rank has said where."""
    with hosts(2) as job:
        codes = [process.wait(120) for process in start(job, launcher, tmp_path)]
    said = "".join((tmp_path / f"out{node}").read_text() for node in range(2))
    assert 0 not in codes, said
    (text,) = (tmp_path / "reports").glob(f"{name}*.txt")
    assert f"report in {text}" in said
    assert text.read_text().startswith("MISMATCH  different collectives  rank 1")
    (first, *_) = json.loads(text.with_suffix(".json").read_text())["diagnoses"]
    assert first["culprits"] == [1]
    assert said.count("MISMATCH") == attempts, said
    # Elastic may start and end ranks in between, when the agents do not see a failure at one moment.
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    kinds = [event["diagnosis"]["kind"] for event in events if event["event"] == "verdict"]
    assert kinds.count("op_mismatch") == attempts, kinds


@pytest.mark.soak
def test_in_a_container_with_little_memory(tmp_path: Path) -> None:
    """Its own processes, and a /dev/shm that is too small for two ranks: the guard works, and says where it writes."""
    (tmp_path / "train.py").write_text(PROGRAM)
    command = f"mount -t tmpfs -o size=3m tmpfs /dev/shm && cd {tmp_path} && exec {sys.executable} -m distsim run"
    done = subprocess.run(
        [
            "unshare",
            "--pid",
            "--fork",
            "--mount-proc",
            "-m",
            "sh",
            "-c",
            f"{command} --on gloo --nproc-per-node 2 train.py",
        ],
        env={**os.environ, "PYTHONPATH": str(HERE.parent), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert "/dev/shm has 3 MiB free, so the flight records (4 MiB, 2 a rank) are in" in done.stderr
