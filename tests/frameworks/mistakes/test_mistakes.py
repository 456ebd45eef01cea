"""A mistake planted in a small program of each framework: the report on real gloo names the user's line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = sorted(Path(__file__).resolve().parent.glob("*_on_one_rank.py"))
PACKAGES = {
    "lightning": "lightning",
    "accelerate": "accelerate",
    "torchmetrics": "torchmetrics",
    "transformers": "transformers",
    "ignite": "ignite",
}
LIBRARY_CALLS = {"lightning", "accelerate", "torchmetrics", "ignite"}
"""Those in which the library makes the call: its line stands beside the user's."""


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_the_users_line_is_named(program: Path, tmp_path: Path) -> None:
    """The culprit is rank 0, at the marked line of the program, however deep in the framework the call is made."""
    package = PACKAGES[program.stem.partition("_")[0]]
    pytest.importorskip(package)
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "distsim", "run", "--on", "gloo", "--nproc-per-node", "2"]
    command += ["--hang-after", "90", "--report", str(report), str(program)]
    environ = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    done = subprocess.run(
        command, cwd=program.parent, env=environ, capture_output=True, text=True, timeout=380, check=False
    )
    first = json.loads(report.read_text())["diagnoses"][0]
    marked = [n for n, line in enumerate(program.read_text().splitlines(), 1) if "# <- culprit" in line]
    assert (first["culprits"], done.returncode) == ([0], 4), done.stderr
    place = first["sites"]["0"]
    assert (place["file"], [place["line"]]) == (program.name, marked)
    assert ("through" in place) == (package in LIBRARY_CALLS)
    assert f"{program.name}:{marked[0]}" in done.stderr + done.stdout
