"""What runs on a Mac: all that simulates. What needs Linux is left out, in one line."""

from __future__ import annotations

import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from distsim.errors import UsageError
from tests.house.tree import ROOT

HERE = "tests.cli.as_on_macos"
PROGRAM = """\
import torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
model(torch.ones(8, 64, device="cuda")).sum().backward()
"""
TEST = """\
import pytest, torch, distsim, torch.distributed as dist

@pytest.mark.ranks(4)
def test_sum(rank, world):
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor[0] == 4

def test_simulate():
    def body():
        dist.init_process_group("gloo")
        return dist.get_rank()
    assert distsim.simulate(body, on="ethernet-cpu:2", nproc_per_node=2).results == [0, 1, 2, 3]
"""


def on_a_mac(*words: str, cwd: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", HERE, *words],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(cwd)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["distsim", "run", "--on", "dgx-h100:1", "train.py"], 0, "no watchdog process runs, because it needs Linux"),
        (["pytest", "-q", "-p", "no:cacheprovider", "test_ranks.py"], 0, "2 passed"),
        (["distsim", "attach"], 2, "attach finds ranks in /proc, which only Linux has; this is darwin"),
    ],
    ids=["run", "pytest", "attach"],
)
def test_a_mac_simulates(words: list[str], code: int, text: str, tmp_path: Path) -> None:
    """Without memfd, real-time signals, affinity, /proc, prctl, MADV_REMOVE and .so files."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "test_ranks.py").write_text(TEST)
    ended, said = on_a_mac(*words, cwd=tmp_path)
    assert (ended, text in " ".join(said.split())) == (code, True), said
    assert "Traceback" not in said


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["topo", "list"],
        ["bench", "all_reduce", "--on", "dgx-h100:1", "-b", "8", "-e", "64"],
        ["sweep", "--on", "ethernet-cpu:1,ethernet-cpu:2", "train.py"],
        ["doctor"],
        ["run", "--on", "gloo", "train.py"],
    ],
    ids=lambda words: words[0],
)
def test_the_other_commands_do_too(words: list[str], tmp_path: Path) -> None:
    """A real run has no guard there, and says so."""
    (tmp_path / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    ended, said = on_a_mac("distsim", *words, cwd=tmp_path)
    assert ended == 0, said
    assert ("the job runs without a guard: it reads /proc" in said) == (words[0] == "run")


def test_windows_is_led_to_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, where `run` is imported."""
    sysconfig.get_config_vars()
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UsageError, match=r"^expected Linux or macOS, got Windows: run distsim in WSL"):
        runpy.run_path(str(ROOT / "distsim" / "cli" / "run.py"))
