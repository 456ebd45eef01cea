"""What `distsim run --on-slow` makes of a rank that is slower in every step of a real job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kin import one_in

PROGRAM = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(110):
    time.sleep(0.04 * (1.6 if dist.get_rank() == 2 else 1.0))
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "code", "named"), one_in(2, [pytest.param("fail", 5, True), pytest.param("ignore", 0, False)])
)
def test_a_slow_rank_may_fail_the_job_or_be_ignored(word: str, code: int, named: bool, tmp_path: Path) -> None:
    """The job itself ends well."""
    (tmp_path / "train.py").write_text(PROGRAM)
    words = ["run", "--on", "gloo", "--nproc-per-node", "4", "--on-slow", word, "--events", "events.jsonl", "train.py"]
    command = [sys.executable, "-m", "distsim", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    culprits = [event["diagnosis"]["culprits"] for event in events if event["event"] == "straggler"]
    assert culprits[:1] == ([[2]] if named else [])
