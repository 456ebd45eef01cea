"""A rank whose interpreter goes down while a monitor still asks for its stack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distsim.realexec.session import STACK_SIGNAL

ASKS = """\
import os, sys, time
print("ready", flush=True)
try:
    while True:
        os.kill(int(sys.argv[1]), int(sys.argv[2]))
        time.sleep(0.001)
except ProcessLookupError:
    pass
"""
ENDS = """\
import os, subprocess, sys

words = [sys.executable, "asks.py", str(os.getpid()), sys.argv[1]]
subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.readline()
sys.exit(3)
"""


@pytest.mark.slow
def test_a_rank_that_ends_is_not_killed_by_the_question_where_it_is(tmp_path: Path) -> None:
    """faulthandler is gone before the process is: what comes later is ignored, and the exit code is the program's."""
    (tmp_path / "asks.py").write_text(ASKS)
    (tmp_path / "ends.py").write_text(ENDS)
    words = [sys.executable, "-m", "distsim.debug", "ends.py", str(int(STACK_SIGNAL))]
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "DISTSIM_DIR": str(tmp_path / "rings")}
    job = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert job.returncode == 3, job.stderr
