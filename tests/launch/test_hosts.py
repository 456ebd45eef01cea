"""Several hosts, in network namespaces: one verdict for all, also when a host is cut off."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HERE, free_port

from distsim.scenario.real.namespaces import Hosts, hosts, missing

WITHOUT = missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(WITHOUT is not None, reason=f"no network namespaces here: {WITHOUT}"),
]

MISMATCH = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(4)
for _ in range(50):
    dist.all_reduce(t)
if dist.get_rank() == dist.get_world_size() - 1:
    dist.barrier()
else:
    dist.all_reduce(t)
"""

ENDLESS = """
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(4)
for step in range(10**6):
    dist.all_reduce(t)
    if step == 100 and dist.get_rank() == 0:
        Path("ready").write_text("now")
    time.sleep(0.01)
"""


SIZES = ((2, 1), pytest.param(4, 2, marks=pytest.mark.soak))
"""Hosts, and ranks on each."""


def test_what_a_killed_process_left_is_no_obstacle() -> None:
    """Names hold the process's number, which comes again: its bridge and namespaces of then are taken away."""
    tag = f"ds{os.getpid()}"
    subprocess.run(["ip", "link", "add", f"{tag}br", "type", "bridge"], check=True)
    subprocess.run(["ip", "netns", "add", f"{tag}g0"], check=True)
    with hosts(1) as job:
        assert job.names == (f"{tag}g0",)
    assert tag not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


def start(job: Hosts, tmp_path: Path, program: str, ranks: int) -> list[subprocess.Popen[bytes]]:
    """`distsim run --on gloo` on each host, as an operator would."""
    (tmp_path / "train.py").write_text(program)
    port = str(free_port())
    started = []
    for node in range(len(job.names)):
        environ = dict(os.environ, PYTHONPATH=str(HERE.parent), OMP_NUM_THREADS="1")
        environ["GLOO_SOCKET_IFNAME"] = job.interface(node)
        words = ["--on", "gloo", "--nnodes", str(len(job.names)), "--node-rank", str(node)]
        words += ["--nproc-per-node", str(ranks)]
        words += ["--master-addr", job.addresses[0], "--master-port", port, "--rings", f"rings{node}", "train.py"]
        with (tmp_path / f"out{node}").open("wb") as out:
            started.append(
                subprocess.Popen(
                    [*job.enter(node), sys.executable, "-m", "distsim", "run", *words],
                    env=environ,
                    cwd=tmp_path,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
    return started


def verdict(tmp_path: Path, node: int) -> dict[str, object]:
    """The first diagnosis that a host's monitor wrote down."""
    said = json.loads((tmp_path / f"rings{node}" / "verdict.json").read_text())
    return dict(said["diagnoses"][0])


@pytest.mark.parametrize(("nodes", "ranks"), SIZES)
def test_a_mismatch_is_named_on_every_host(nodes: int, ranks: int, tmp_path: Path) -> None:
    """The last rank calls something else: every launcher ends with 4 and the same diagnosis."""
    with hosts(nodes) as job:
        codes = [process.wait(120) for process in start(job, tmp_path, MISMATCH, ranks)]
    assert codes == [4] * nodes, [(tmp_path / f"out{node}").read_text() for node in range(nodes)]
    logs = [(tmp_path / f"out{node}").read_text() for node in range(nodes)]
    assert sum("the report is in the log of host" in log for log in logs) == nodes - 1, logs
    (report,) = (log for log in logs if "MISMATCH" in log and "is pid" in log)
    assert f"rings{nodes - 1}" in " ".join(report.split())
    told = [verdict(tmp_path, node) for node in range(nodes)]
    assert {said["kind"] for said in told} == {"op_mismatch"}
    assert [said["culprits"] for said in told] == [[nodes * ranks - 1]] * nodes


@pytest.mark.soak
@pytest.mark.parametrize(("nodes", "ranks"), SIZES)
def test_a_host_that_is_cut_off_is_named(nodes: int, ranks: int, tmp_path: Path) -> None:
    """The last host loses its network in the middle: its ranks are named, and everybody ends with 3."""
    os.mkfifo(tmp_path / "ready")
    ready = os.open(tmp_path / "ready", os.O_RDONLY | os.O_NONBLOCK)
    with hosts(nodes) as job:
        started = start(job, tmp_path, ENDLESS, ranks)
        assert select.select([ready], [], [], 90)[0]
        job.cut(nodes - 1)
        codes = [process.wait(90) for process in started]
    os.close(ready)
    assert codes == [3] * nodes, [(tmp_path / f"out{node}").read_text() for node in range(nodes)]
    said = verdict(tmp_path, 0)
    assert said["kind"] == "network_fault"
    assert said["culprits"] == list(range((nodes - 1) * ranks, nodes * ranks))


BETWEEN_HOSTS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
t = torch.ones(4)
for step in range(80):
    if rank == 1:
        dist.send(torch.ones(4 if step == 75 else 8), 2)
    elif rank == 2:
        dist.recv(torch.ones(8), 1)
    dist.all_reduce(t)
t = torch.ones(1 << 14)
for _ in range(5000):
    dist.all_reduce(t)
print("came through", flush=True)
"""


@pytest.mark.soak
def test_a_message_between_hosts_is_compared_by_the_leader(tmp_path: Path) -> None:
    """Neither end is on the first host; its monitor tells it while all go on, and every launcher ends with 4."""
    with hosts(4) as job:
        codes = [process.wait(120) for process in start(job, tmp_path, BETWEEN_HOSTS, 1)]
    said = [(tmp_path / f"out{node}").read_text() for node in range(4)]
    assert codes == [4, 4, 4, 4], said
    assert not any("came through" in text for text in said), said
    found = verdict(tmp_path, 0)
    assert (found["kind"], found["culprits"]) == ("p2p_size_mismatch", [1])


MULTICAST = """
import os, sys
import torch
import distsim.deprecated as dist

dist.init_process_group("tcp", init_method="tcp://239.255.77.1:23456", world_size=2, group_name=sys.argv[1])
t = torch.ones(1) + dist.get_rank()
dist.all_reduce(t)
print(sys.argv[1], sorted([dist.get_rank(), 1 - dist.get_rank()]), t.item())
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_ranks_are_given_across_hosts(tmp_path: Path) -> None:
    """Two jobs of two hosts find their processes at one multicast address, each by its group_name."""
    (tmp_path / "train.py").write_text(MULTICAST)
    with hosts(2) as job:
        started = []
        for node, name in ((0, "a"), (0, "b"), (1, "a"), (1, "b")):
            environ = dict(os.environ, PYTHONPATH=str(HERE.parent), OMP_NUM_THREADS="1")
            environ["GLOO_SOCKET_IFNAME"] = job.interface(node)
            command = [*job.enter(node), sys.executable, "-W", "ignore", "train.py", name]
            started.append(
                subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            )
        said = [process.communicate(timeout=120) for process in started]
    assert [out.decode().split() for out, _ in said] == [[name, "[0,", "1]", "3.0"] for name in ("a", "b", "a", "b")], (
        said
    )


PACE = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
buckets = [torch.ones(64), torch.ones(65)]
for step in range(160):
    works = []
    for bucket in buckets:
        time.sleep(0.03 * (1.3 if dist.get_rank() == 3 else 1.0))
        works.append(dist.all_reduce(bucket, async_op=True))
    for work in works:
        work.wait()
"""


def test_clocks_of_hosts_are_compared(tmp_path: Path) -> None:
    """All calls are asynchronous: who comes later to them is seen on another host because of that."""
    with hosts(2) as job:
        codes = [process.wait(120) for process in start(job, tmp_path, PACE, 2)]
    logs = [(tmp_path / f"out{node}").read_text() for node in range(2)]
    assert codes == [0, 0], logs
    said = verdict(tmp_path, 0)
    assert (said["kind"], said["culprits"]) == ("straggler", [3]), logs
