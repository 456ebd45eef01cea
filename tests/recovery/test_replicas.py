"""Process groups that torchft makes itself, under the guard, on a stand-in that makes them as torchft 0.2.0 does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from distsim.debug.rings.files import job_name
from distsim.realexec.replicas import MODULE, ReplicaGroups
from distsim.torch_compat.names import Patches
from tests.jobs import ENVIRON, free_port

STAND_IN = """\
import torch
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo as Gloo, TCPStore

class ProcessGroupWrapper(ProcessGroup):
    def __init__(self):
        super().__init__(0, 1)

    def configure(self, store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_size, global_ranks):
        self._quorum_id, self._group_rank, self._global_ranks = quorum_id, group_rank, global_ranks
        address, _, prefix = store_addr.partition("/")
        host, _, port = address.rpartition(":")
        store = PrefixStore(prefix, TCPStore(host, int(port), is_master=False, wait_for_workers=False))
        self._pg = self._create_pg(store, rank, world_size)

    def allreduce(self, tensors, opts):
        return self._pg.allreduce(tensors, opts)

class ProcessGroupGloo(ProcessGroupWrapper):
    def _create_pg(self, store, rank, world_size):
        group = ProcessGroup(store, rank, world_size)
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, Gloo(store, rank, world_size))
        return group
"""

PROGRAM = """\
import os, threading
import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupGloo

me, port, again = int(os.environ["REPLICA"]), int(os.environ["STORE"]), "AGAIN" in os.environ
store = dist.TCPStore("127.0.0.1", port, is_master=me == 0, wait_for_workers=False)
group = ProcessGroupGloo()

def quorum(number, ranks):
    at = f"127.0.0.1:{port}/torchft/{number}/0"
    group.configure(at, f"replica_{me}", ranks.index(me), len(ranks), number, 0, 1, ranks)

def mean(dtype=torch.float32):
    group.allreduce([torch.ones(4, dtype=dtype)], dist.AllreduceOptions()).wait()

if not again:
    quorum(1, [0, 1])
    mean()
"""

SKIPS = """
mean() if me == 0 else threading.Event().wait()
"""
DIFFERS = """
mean(torch.float32 if me == 0 else torch.int32)
mean()
"""
DIES = """
if me == 1 and not again:
    os.kill(os.getpid(), 9)
if not again:
    try:
        mean()
    except RuntimeError:
        quorum(2, [0])
mean() if not again else None
print("alone", flush=True)
if "RETURNS" in os.environ:
    quorum(3, [0, 1])
    mean()
print("end", flush=True)
"""


class Replicas:
    """Two replicas, each started by a launcher of its own."""

    def __init__(self, folder: Path, rest: str, **environ: str) -> None:
        (folder / "torchft").mkdir()
        (folder / "torchft" / "__init__.py").write_text("")
        (folder / "torchft" / "process_group.py").write_text(STAND_IN)
        (folder / "job.py").write_text(PROGRAM + rest)
        port, path = str(free_port()), os.pathsep.join([str(folder), *sys.path[1:]])
        launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
        settings = {"DISTSIM_DIR": str(folder / "rings"), "DISTSIM_HANG_AFTER": "3", "DISTSIM_ON_HANG": "abort"}
        self.folder = folder
        self.environ = {**ENVIRON, "PYTHONPATH": path, "STORE": port, **launched, **settings, **environ}

    def start(self, replica: int, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "distsim.debug", "job.py"],
            cwd=self.folder,
            env={**self.environ, "REPLICA": str(replica), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def output(self) -> str:
        replicas = [self.start(0), self.start(1)]
        return " ".join("".join(replica.communicate(timeout=120)[0] for replica in replicas).split())


@pytest.mark.slow
def test_a_call_that_one_replica_skips_is_a_hang_with_who_and_where(tmp_path: Path) -> None:
    """The group has torchft's name, and replica 1 is rank 1."""
    text = Replicas(tmp_path, SKIPS).output()
    assert "HANG host stuck rank 1 all_reduce #2 " in text, text
    assert f"Rank 1 is stuck outside torch.distributed, at job.py:{len((PROGRAM + SKIPS).splitlines())}," in text
    assert "Rank 0 waits in all_reduce #2 float32[4] SUM on group torchft (reconfigured, 1) (ranks 0,1)" in text


@pytest.mark.slow
def test_calls_that_differ_are_a_mismatch(tmp_path: Path) -> None:
    """gloo would sum the bytes of both."""
    text = Replicas(tmp_path, DIFFERS).output()
    assert "MISMATCH dtype mismatch rank 1 all_reduce #2 " in text, text


@pytest.mark.slow
@pytest.mark.parametrize("returns", [False, True])
def test_a_replica_that_dies_is_no_fault(tmp_path: Path, returns: bool) -> None:
    """The other goes on in a new quorum, and the replica may return under the next attempt of its launcher."""
    job = Replicas(tmp_path, DIES, DISTSIM_HANG_AFTER="60", **({"RETURNS": "1"} if returns else {}))
    first, second = job.start(0), job.start(1)
    assert second.wait(timeout=120) == -9  # its output may be the monitor's as well, and end later
    later = [job.start(1, AGAIN="1", TORCHELASTIC_RESTART_COUNT="1")] if returns else []
    outputs = [replica.communicate(timeout=120)[0] for replica in [first, *later, second]]
    assert all("end" in output for output in outputs[:-1]), outputs
    assert not re.search("HANG|ERROR|MISMATCH", "".join(outputs)), outputs
    assert returns or re.search("went on without rank 1 by reconfigure at .*; all_reduce #2 at", "".join(outputs))


@pytest.mark.slow
def test_replicas_in_two_folders_are_refused_by_name(tmp_path: Path) -> None:
    """Each says whose records it lacks, and the job goes on."""
    job = Replicas(tmp_path, "mean()\nprint('end')")
    replicas = [job.start(replica, DISTSIM_DIR=str(tmp_path / f"rings{replica}")) for replica in range(2)]
    for replica, other in zip(replicas, (1, 0), strict=True):
        output = replica.communicate(timeout=120)[0]
        assert f"not watched, so hangs in their calls are not reported: the flight records of rank {other} " in output
        assert "end" in output


def test_all_replicas_are_one_job() -> None:
    """Whatever address their launchers have; other jobs have other lighthouses."""
    one = {"TORCHFT_LIGHTHOUSE": "http://a:1"}
    assert job_name({**one, "MASTER_PORT": "1"}) == job_name({**one, "MASTER_PORT": "2"}, "where")
    assert job_name(one) != job_name({"TORCHFT_LIGHTHOUSE": "http://a:2"})


class _Wrapper:
    """A group without numbers of replicas, of which two have one."""

    _global_ranks: Any = (0, 0)


class _Gloo(_Wrapper):
    def _create_pg(self, store: Any, rank: int, world_size: int) -> None:
        return


class _Baby:
    def configure(self, address: str) -> str:
        return address


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1 << 40), None])
def test_what_is_not_watched_is_named_once(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replicas without numbers of their own, and groups in another process; torchft works as before."""
    module = ModuleType(MODULE)
    module.__dict__.update(ProcessGroupWrapper=_Wrapper, ProcessGroupGloo=_Gloo, ProcessGroupBaby=_Baby)
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(_Wrapper, "_global_ranks", ranks)
    session: Any = SimpleNamespace(heartbeat=SimpleNamespace(makes_unwatched_calls=False))
    patches = Patches()
    for use, words in (
        (lambda: _Gloo()._create_pg(None, 0, 2), "expected replica ids that end in the replica's number"),
        (lambda: _Baby().configure("at"), "_Baby makes its calls in a process of its own"),
    ):
        groups = ReplicaGroups(patches, lambda world, where: None, lambda: session)
        groups.watch()
        use()
        use()
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
        assert session.heartbeat.makes_unwatched_calls
        patches.remove()
