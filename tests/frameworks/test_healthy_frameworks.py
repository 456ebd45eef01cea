"""Programs that stand on other people's frameworks: torchrun, the guard and the simulator give one output.

`.ci/soak` installs the frameworks (.ci/frameworks.txt); a framework that is not there is skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "healthy"
LIMIT_S = 280


@dataclass(frozen=True)
class Program:
    """One file of healthy/, the package it needs, and how it is started."""

    name: str
    package: str
    args: str = ""
    """Words for the program; FOLDER is a fresh folder."""
    ranks: int = 2

    @property
    def path(self) -> str:
        return str(HERE / f"{self.name}.py")

    def words(self, folder: str) -> list[str]:
        return [folder if word == "FOLDER" else word for word in self.args.split()]


PROGRAMS = (
    Program("nanogpt_train", "torch"),
    Program("accelerate_train", "accelerate"),
    Program("trainer_train", "transformers", "FOLDER"),
    Program("lightning_train", "lightning", "FOLDER"),
    Program("ignite_train", "ignite"),
    Program("torchmetrics_eval", "torchmetrics"),
    Program("megatron_train", "megatron.core", "2 1"),
    Program("megatron_train", "megatron.core", "2 2", ranks=4),
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3 * LIMIT_S)]
each = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: "-".join([p.name, *p.args.lower().split()]))


def run(program: Program, *launcher: str, apart: bool = False) -> str:
    """The standard output of *program* under `python -m` *launcher*; *apart*: of real ranks, each into a file of its
    own, for the launcher starts them with -u, which tears the lines of ranks that print at once."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "DISTSIM"))}
    environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder) / "logs"
        into = ["--log-dir", str(logs), "--redirects", "1"] if apart else []
        command = [sys.executable, "-m", *launcher, *into, program.path, *program.words(folder)]
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return "".join(path.read_text() for path in sorted(logs.rglob("stdout.log"))) if apart else done.stdout


@functools.cache
def control(program: Program) -> list[str]:
    """What *program* prints where nobody watches it, in no order: ranks print when they like."""
    launcher = "torch.distributed.run", "--standalone", f"--nproc-per-node={program.ranks}"
    return sorted(run(program, *launcher, apart=True).splitlines())


def needs(program: Program) -> None:
    for end in range(program.package.count(".") + 1):
        name = ".".join(program.package.split(".")[: end + 1])
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{program.package} is not installed")


@each
def test_the_guard_changes_no_output(program: Program) -> None:
    """Run for real under the guard, a program of a framework prints what it prints under torchrun."""
    needs(program)
    found = run(program, "distsim", "run", "--on", "gloo", f"--nproc-per-node={program.ranks}", apart=True)
    assert sorted(found.splitlines()) == control(program)


@each
def test_the_simulator_changes_no_output(program: Program) -> None:
    """Simulated, a program of a framework prints what it prints under torchrun."""
    needs(program)
    found = run(program, "distsim", "run", "--on", "ethernet-cpu:1", f"--nproc-per-node={program.ranks}")
    labels = tuple(f"[{rank}] " for rank in range(program.ranks))
    told = [line.partition(" ")[2] for line in found.splitlines() if line.startswith(labels)]
    assert sorted(told) == control(program)
