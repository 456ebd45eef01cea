"""Backend "mpi" by mpi4py: what mpirun says, what is refused, and every call for real beside its simulation."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import run

from distsim.cli import main
from distsim.debug.settings import Settings
from distsim.errors import UsageError
from distsim.mpi import group, launch, library
from distsim.realexec import install
from distsim.realexec.process.worlds import Started, started_by_mpirun
from distsim.sim.c10d import refusals

HERE = Path(__file__).parent

LEAVES = """
import os
import sys
import torch
import torch.distributed as dist

dist.init_process_group("mpi")
t = torch.ones(2)
dist.all_reduce(t)
if dist.get_rank() == 1:
    sys.exit(0)
dist.all_reduce(t)
"""


DISTSIM = ("-m", "distsim", "run", "--on", "mpi", "train.py")


def _has_mpi() -> bool:
    return library.is_installed() and shutil.which("mpirun") is not None


needs_mpi = pytest.mark.skipif(not _has_mpi(), reason="no mpirun, or no mpi4py, here")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "4"}, None),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "PMIX_NAMESPACE": "7",
            },
            Started(3, 4, 1, 2, "mpirun 7"),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "j"}, Started(1, 2, 1, 2, "mpirun j")),
    ],
)
def test_what_mpirun_says(environ: dict[str, str], expected: Started | None) -> None:
    """The place of a process is read from Open MPI's variables, or from Hydra's."""
    assert started_by_mpirun(environ) == expected


def test_both_arms_have_the_same_dtypes() -> None:
    """The simulator refuses what MPI has no datatype for, and nothing else."""
    assert set(group._NAMES) == set(refusals.TYPES["mpi"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nnodes": "2"}, "mpirun -n RANKS --hostfile HOSTS distsim run --on mpi train.py"),
        ({"nproc_per_node": "gpu"}, "--nproc-per-node: expected the number of ranks, 1 or more, got gpu"),
        ({"nproc_per_node": "0"}, "--nproc-per-node: expected the number of ranks, 1 or more, got 0"),
    ],
)
def test_what_mpirun_is_not_asked_for(given: dict[str, str], words: str) -> None:
    """Several hosts, and numbers of ranks that are none, are one line with the remedy."""
    args = argparse.Namespace(**({"nnodes": None, "nproc_per_node": None, "training_script": "train.py"} | given))
    with pytest.raises(UsageError, match=words.replace("--", "-?-?").replace("(", r"\(")):
        launch.run_mpirun(args, [])


def test_another_number_of_ranks_than_mpirun_started() -> None:
    """Under mpirun the ranks are there; a flag that says another number is a mistake, told by the first of them."""
    args = argparse.Namespace(nproc_per_node="3")
    with pytest.raises(UsageError, match="mpirun has started 2 ranks on this host; leave it out"):
        launch.become_rank(args, Started(0, 2, 0, 2, "j"), Settings())
    assert launch.become_rank(args, Started(1, 2, 1, 2, "j"), Settings()) == 2


def test_no_mpirun(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mpirun or mpiexec --on mpi says what to install."""
    (tmp_path / "x.py").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(library, "is_installed", lambda: True)
    assert main(["run", "--on", "mpi", "--level", "off", str(tmp_path / "x.py")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("distsim: error: --on mpi: no mpirun or mpiexec in PATH; install an MPI")


def test_a_guard_makes_no_backend_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `is_mpi_available()` says under guard changes where mpirun has started the process, and nowhere else."""
    asked: list[object] = []
    monkeypatch.setattr("distsim.mpi.group.enable", lambda *_: asked.append(1))
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    install.install(level="off")
    assert asked == []
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    install.install(level="off")
    assert asked == [1]


class Wire:
    """Two ends of MPI: what one sends to the other is there when it looks."""

    BYTE = "byte"

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    class Status:
        count = 0

        def Get_count(self, kind: str) -> int:
            return self.count

    def Isend(self, what: list[Any], peer: int, tag: int) -> None:
        assert peer == 2
        self.sent.append(what[0])

    def Iprobe(self, peer: int, tag: int, status: Status) -> bool:
        status.count = len(self.sent[0]) if self.sent else 0
        return bool(self.sent)

    def Recv(self, what: list[Any], peer: int, tag: int) -> None:
        what[0][:] = self.sent.pop()


def test_monitors_of_an_mpi_job_are_introduced_over_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun's jobs have no store: rank 0 says where its monitor is to the first rank of each other host, once."""
    wire = Wire()
    monkeypatch.setattr(library, "mpi", lambda: wire)
    lead, follow = library.Introduction(wire, [2]), library.Introduction(wire, [2])
    assert not follow.check(["key"])
    lead.set("key", '{"port": 1}')
    assert follow.check(["key"])
    assert follow.check(["key"])
    assert follow.get("key") == b'{"port": 1}'


def test_the_mpi_of_the_mpirun_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several MPIs are installed, mpi4py is told to load Open MPI under Open MPI's mpirun; MPICH without the
    library's usual name is told with its own remedy."""
    monkeypatch.setattr(library, "_MPI", None)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.delenv("MPI4PY_MPIABI", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(rc=SimpleNamespace()))
    with pytest.raises(RuntimeError, match="no MPI can be loaded"):
        library.mpi()
    assert os.environ["MPI4PY_MPIABI"] == "openmpi"
    monkeypatch.delenv("MPI4PY_MPIABI")


@needs_mpi
@pytest.mark.soak
@pytest.mark.slow
def test_every_call_is_as_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of mpirun and two simulated ones get the same from every call that MPI has, and refuse the same."""
    program = str(HERE / "mpi_program.py")
    real = run("-m", "distsim", "run", "--on", "mpi", "--nproc-per-node", "2", program, cwd=tmp_path)
    assert real.returncode == 0, real.stderr
    simulated = run("-m", "distsim", "run", "--on", "ethernet-cpu:2", "--nproc-per-node", "1", program, cwd=tmp_path)
    assert simulated.returncode == 0, simulated.stderr
    assert _answers(real.stdout) == _answers(simulated.stdout)
    assert len(_answers(real.stdout)) == 2


def _answers(out: str) -> set[str]:
    lines = (line[line.find("{") :] for line in out.splitlines() if '"backend"' in line)
    return {json.dumps(json.loads(line), sort_keys=True) for line in lines}


@needs_mpi
@pytest.mark.soak
@pytest.mark.slow
def test_a_rank_that_leaves_is_named(tmp_path: Path) -> None:
    """A rank that is at MPI's end already, where it waits for those that need it, has left its program."""
    (tmp_path / "train.py").write_text(LEAVES)
    done = run(
        "-m", "distsim", "run", "--on", "mpi", "--nproc-per-node", "2", "--report", "r.json", "train.py", cwd=tmp_path
    )
    assert done.returncode == 3, done.stderr
    (said,) = json.loads((tmp_path / "r.json").read_text())["diagnoses"]
    assert (said["kind"], said["culprits"]) == ("rank_exited", [1])


@needs_mpi
@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("end", ["raise ValueError('boom')", "sys.exit(3)", "os.kill(os.getpid(), 9)"])
def test_under_mpirun(end: str, tmp_path: Path) -> None:
    """Started by mpirun itself, a rank that fails is named before mpirun ends the others."""
    (tmp_path / "train.py").write_text(LEAVES.replace("sys.exit(0)", end))
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    done = subprocess.run(
        ["mpirun", *root, "--oversubscribe", "-n", "2", sys.executable, *DISTSIM],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "rank 1" in done.stderr + done.stdout
    assert "Rank 1 " in done.stderr + done.stdout
