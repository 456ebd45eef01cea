"""torch.distributed.launch's way of starting a script: its local rank is an argument."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distsim.cli import main as run
from distsim.deprecated.launch import main

SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("FLAG", type=int, default=-1)
parser.add_argument("--lr", type=float)
given = parser.parse_args()
print("rank", os.environ["RANK"], "local", given.local_rank, "of", os.environ["LOCAL_RANK"], given.lr, flush=True)
"""


def words_of(folder: Path, flag: str, *words: str) -> list[str]:
    """The arguments that start a script that has *flag*."""
    (folder / "train.py").write_text(SCRIPT.replace("FLAG", flag))
    return [*words, "train.py", "--lr", "0.5"]


def lines_of(text: str) -> list[str]:
    """What the ranks printed, sorted."""
    return sorted(line.partition("rank ")[2] for line in text.splitlines() if "local" in line)


def test_a_script_is_told_its_local_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the argument that it knows, of either spelling; with --use_env by the environment only."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    monkeypatch.setattr("distsim.cli.main", lambda: run(sys.argv[1:]))  # in this process
    where = ("--on", "ethernet-cpu:1", "--quiet")
    for flag in ("--local_rank", "--local-rank"):
        assert main(words_of(tmp_path, flag, *where, "--nproc_per_node=2")) == 0
        assert lines_of(capfd.readouterr().out) == ["0 local 0 of 0 0.5", "1 local 1 of 1 0.5"]
    assert main(words_of(tmp_path, "--local_rank", *where, "--nproc_per_node=1", "--use_env")) == 0
    assert lines_of(capfd.readouterr().out) == ["0 local -1 of 0 0.5"]


@pytest.mark.soak
@pytest.mark.slow
def test_real_ranks_are_told_alike(tmp_path: Path) -> None:
    """The module started as a program, with gloo."""
    words = words_of(tmp_path, "--local-rank", "--on", "gloo", "--nproc_per_node=2")
    command = [sys.executable, "-m", "distsim.deprecated.launch", *words]
    environ = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert lines_of(done.stdout) == ["0 local 0 of 0 0.5", "1 local 1 of 1 0.5"]
