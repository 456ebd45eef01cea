"""Programs that start their own ranks: the guard goes along with mp.spawn and Process, and no further."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HERE, free_port

from distsim.debug.rings.reader import RingReader

pytestmark = pytest.mark.slow

PROGRAM = """
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader


def main(rank, world, fault):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    assert [int(n) for n in DataLoader(range(2), num_workers=1)] == [0, 1]  # its workers are no ranks
    t = torch.ones(2)
    dist.all_reduce(t)
    if fault == "raise" and rank == 1:
        raise ValueError("a bad shard")  # <- raise
    if fault != "hang" or rank != 1:
        dist.all_reduce(t)  # <- hang
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _, port, method, fault = sys.argv
    world = 3 if fault == "hang" else 2
    if method == "mp.spawn":
        mp.spawn(main, args=(world, fault), nprocs=world)
    else:
        mp.set_start_method(method)
        ranks = [mp.Process(target=main, args=(rank, world, fault)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        sys.exit(max(process.exitcode for process in ranks))
"""


def launched(folder: Path, *words: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    """`distsim run --on gloo` with one process, which starts the ranks."""
    (folder / "train.py").write_text(program)
    return subprocess.run(
        [sys.executable, "-m", "distsim", "run", "--on", "gloo", "--rings", "rings", "train.py", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, object]]]:
    """`python -m distsim.debug` on the program; its verdict."""
    (folder / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "distsim.debug", "train.py", str(free_port()), *words],
        cwd=folder,
        env={**os.environ, "DISTSIM_DIR": "rings", "DISTSIM_ON_HANG": "abort", "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done, json.loads((folder / "rings" / "verdict.json").read_text())["diagnoses"]


SOAK = pytest.mark.soak


@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "method", "fault", "kind"),
    [
        ("debug", "mp.spawn", "none", None), ("debug", "spawn", "none", None), ("debug", "fork", "none", None),
        ("debug", "mp.spawn", "raise", "rank_raised"), ("debug", "spawn", "hang", "missing_rank"),
        ("debug", "fork", "raise", "rank_raised"), ("launched", "fork", "none", None),
        ("launched", "fork", "hang", "missing_rank"), ("launched", "mp.spawn", "hang", "missing_rank"),
        ("launched", "spawn", "raise", "rank_raised"), ("launcher's port", "fork", "none", None),
    ],
)  # fmt: skip
def test_started_ranks_are_under_guard(how: str, method: str, fault: str, kind: str | None, tmp_path: Path) -> None:
    """`python -m distsim.debug`, and the one process of a launcher, which is no rank, also where the ranks that it
    starts meet in the launcher's store: each has a ring with its calls; who is at fault is named with its line."""
    if how == "debug":
        done, diagnoses = run(tmp_path, method, fault)
    else:
        own = 'os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])'
        program = PROGRAM.replace(own, "pass" if how == "launcher's port" else own)
        done = launched(tmp_path, str(free_port()), method, fault, program=program)
        verdict = tmp_path / "rings" / "verdict.json"
        diagnoses = json.loads(verdict.read_text())["diagnoses"] if verdict.exists() else []
        assert done.returncode == {None: 0, "missing_rank": 3, "rank_raised": 1}[kind], done.stderr
    assert [(one["kind"], one["culprits"]) for one in diagnoses[:1]] == ([(kind, [1])] if kind else []), done.stderr
    if kind is None:
        assert rings(tmp_path) == [(0, 2), (1, 2)]
        readers = [RingReader(path) for path in sorted((tmp_path / "rings").glob("*.ring"))]
        calls = [[reader.decode(record, 0).op for record in reader.since(0)[0]] for reader in readers]
        assert calls == [["init_process_group", "all_reduce", "all_reduce", "barrier"]] * 2
        assert "no process group" not in done.stderr
    else:
        marked = [n for n, line in enumerate(PROGRAM.splitlines(), 1) if f"# <- {fault}" in line]
        assert f"train.py:{marked[0]}" in str(diagnoses[0]["explanation"])


def rings(folder: Path) -> list[tuple[int, int]]:
    """Rank and world of each ring there."""
    readers = [RingReader(path) for path in sorted((folder / "rings").glob("*.ring"))]
    return [(reader.header.rank, reader.header.world_size) for reader in readers]


RPC = """
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def main(rank):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        print(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)))
    rpc.shutdown()
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    mp.start_processes(main, nprocs=2, start_method="fork")
"""


@pytest.mark.soak
def test_rpc_among_started_ranks(tmp_path: Path) -> None:
    """init_rpc has its own rendezvous at the port that the program chose, before it started them: not in the store
    of the launcher's agent."""
    done = launched(tmp_path, str(free_port()), program=RPC)
    assert (done.returncode, done.stdout) == (0, "tensor([2.])\n"), done.stderr
    assert rings(tmp_path) == [(0, 2), (1, 2)]


@pytest.mark.soak
def test_a_program_without_ranks_is_told_of(tmp_path: Path) -> None:
    """Where no group came under guard, one line says so, and how ranks that are started otherwise come under it."""
    done = launched(tmp_path, program="print('well')")
    assert (done.returncode, done.stdout) == (0, "well\n")
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("distsim:"))
    assert "made no process group under guard" in line
    assert "python -m distsim.debug SCRIPT" in line


def test_a_process_keeps_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What install() was told is what a started process is told; a rank's own processes are left alone."""
    from distsim.realexec.process.children import GuardedChild, SpawnHook

    class Process:
        _target, _args = print, ("x",)

    started: list[Process] = []
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", started.append)
    from multiprocessing.process import BaseProcess

    plain = BaseProcess.start
    for is_rank in (False, True):
        hook = SpawnHook(print, {"level": "strict", "dir": "/x"}, lambda is_rank=is_rank: is_rank)
        hook.install()
        BaseProcess.start(Process())  # type: ignore[arg-type]
        hook.remove()
        assert BaseProcess.start is plain
    assert isinstance(started[0]._target, GuardedChild)
    assert started[0]._target.given == {"level": "strict", "dir": "/x"}
    assert started[1]._target is print


RANKS = {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("command", "environ", "guarded"),
    [
        (
            [sys.executable, __file__, "--lr", "1"],
            RANKS,
            [sys.executable, "-m", "distsim.debug", __file__, "--lr", "1"],
        ),
        ([sys.executable, "-u", __file__], RANKS, [sys.executable, "-u", "-m", "distsim.debug", __file__]),
        ((sys.executable, "-m", "train"), RANKS, [sys.executable, "-m", "distsim.debug", "-m", "train"]),
        ([sys.executable, "-m", "distsim.debug", __file__], RANKS, None),
        ([sys.executable, "-c", "pass"], RANKS, None),
        ([sys.executable, "no_such.py"], RANKS, None),
        (["bash", __file__], RANKS, None),
        (f"{sys.executable} {__file__}", RANKS, None),
        ([sys.executable, __file__], None, None),
        ([sys.executable, __file__], {"WORLD_SIZE": "1", "LOCAL_RANK": "1"}, None),
        ([sys.executable, __file__], {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0"}, None),
        ([sys.executable, __file__], {b"WORLD_SIZE": b"2"}, None),
    ],
)
def test_only_other_ranks_of_the_program_come_under_guard(
    command: object, environ: object, guarded: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python script with the numbers of another rank is one (Lightning starts its ranks so); helpers of this rank,
    other interpreters and what is guarded already are left as they are."""
    from distsim.realexec.process.children import guarded_command

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert guarded_command(command, environ) == guarded


SUBPROCESSES = """
import os
import subprocess
import sys

import torch
import torch.distributed as dist

rank = int(os.environ.get("LOCAL_RANK", "0"))
if "LOCAL_RANK" not in os.environ:  # as Lightning's launcher does
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], WORLD_SIZE="2")
    other = subprocess.Popen([sys.executable, os.path.abspath(sys.argv[0])], env={**os.environ, "LOCAL_RANK": "1"})
dist.init_process_group("gloo", rank=rank, world_size=2)
if rank == 0:
    dist.all_reduce(torch.ones(2))
dist.barrier()
"""


@SOAK
def test_ranks_started_as_subprocesses_are_diagnosed(tmp_path: Path) -> None:
    """Such a rank has a ring of its own, so what it did is known."""
    (tmp_path / "train.py").write_text(SUBPROCESSES)
    done = subprocess.run(
        [sys.executable, "-m", "distsim.debug", "train.py", str(free_port())],
        cwd=tmp_path,
        env={**os.environ, "DISTSIM_DIR": "rings", "DISTSIM_ON_HANG": "abort", "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = json.loads((tmp_path / "rings" / "verdict.json").read_text())["diagnoses"]
    assert [one["kind"] for one in said] == ["extra_collective"], done.stderr
    assert rings(tmp_path) == [(0, 2), (1, 2)]
