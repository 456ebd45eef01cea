"""torch's own test classes of RPC, distributed autograd and distributed optimizer, simulated."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PASS_REAL = Path(__file__).parent / "tensorpipe.txt"
"""Those that pass on real TensorPipe, with the command that says so."""


@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_what_passes_on_tensorpipe_passes_simulated() -> None:
    """At least nine in ten of them (406 of 430 were counted)."""
    command = [sys.executable, "-m", "tests.rpc.torch_classes", "--tensorpipe", str(PASS_REAL)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    told = re.search(r"(\d+) of (\d+) that pass on TensorPipe pass simulated", done.stdout)
    assert told is not None, done.stdout + done.stderr
    here, there = map(int, told.groups())
    assert there > 400
    assert here >= 0.9 * there, "\n".join(line for line in done.stdout.splitlines() if line.startswith("failed"))
