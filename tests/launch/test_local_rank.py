"""torch.distributed.launch's way of starting a script: its local rank is an argument."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("FLAG", type=int, default=-1)
parser.add_argument("--lr", type=float)
given = parser.parse_args()
print("rank", os.environ["RANK"], "local", given.local_rank, "of", os.environ["LOCAL_RANK"], given.lr, flush=True)
"""


def started(folder: Path, flag: str, *words: str) -> list[str]:
    """What the ranks of a script that has *flag* printed, sorted."""
    (folder / "train.py").write_text(SCRIPT.replace("FLAG", flag))
    command = [sys.executable, "-m", "distsim.deprecated.launch", *words, "train.py", "--lr", "0.5"]
    environ = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True)
    lines = [line.partition("rank ")[2] for line in done.stdout.splitlines() if "local" in line]
    return sorted(lines)


PLACES = (("--on", "ethernet-cpu:1", "--quiet"), pytest.param(("--on", "gloo"), marks=pytest.mark.soak))


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
def test_a_script_is_told_its_local_rank(tmp_path: Path, where: tuple[str, ...]) -> None:
    """By the argument that it knows, of either spelling, simulated and real; with --use_env by the environment only."""
    for flag in ("--local_rank", "--local-rank"):
        told = started(tmp_path, flag, *where, "--nproc_per_node=2")
        assert told == ["0 local 0 of 0 0.5", "1 local 1 of 1 0.5"]
    assert started(tmp_path, "--local_rank", *where, "--nproc_per_node=1", "--use_env") == ["0 local -1 of 0 0.5"]
