"""Where the records of a real job go: a full disk, a folder in use. The job goes on, or is refused, in a line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import distsim_run

ENDS_WELL = """
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(2)
for _ in range(8):
    dist.all_reduce(t)
    time.sleep(0.2)
dist.destroy_process_group()
print("finished")
"""


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of that size; skipped where mounting is not permitted."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here (it takes root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.soak
@pytest.mark.slow
def test_room_for_one_ring(tmp_path: Path) -> None:
    """The rank without room says so in one line; the job ends well, and no patience runs out over that rank."""
    (tmp_path / "train.py").write_text(ENDS_WELL)
    with small_disk(tmp_path / "disk", 3 << 10) as disk:
        done = distsim_run("--hang-after", "0.7", "--rings", str(disk / "rings"), "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 2
    assert done.stderr.count("runs unguarded") == 1, done.stderr
    assert "HANG" not in done.stderr


@pytest.mark.slow
def test_no_room_at_all(tmp_path: Path) -> None:
    """On a full disk, the job runs without a guard, and one line says so."""
    (tmp_path / "train.py").write_text(ENDS_WELL)
    with small_disk(tmp_path / "disk", 64) as disk:
        with pytest.raises(OSError, match="No space"):
            (disk / "filling").write_bytes(bytes(1 << 20))
        done = distsim_run("--nproc-per-node", "1", "--rings", str(disk / "rings"), "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("distsim:")]
    assert len(said) == 1, done.stderr
    assert "runs without a guard" in said[0]


@pytest.mark.slow
def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """A second job that is sent to a running one's folder is refused by name; the first ends well."""
    second = """t = torch.ones(2)
if dist.get_rank() == 0:
    import subprocess, sys
    words = ["-m", "distsim", "run", "--on", "gloo", "--rings", "rings", "train.py"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    print("second:", done.returncode, done.stderr)"""
    (tmp_path / "train.py").write_text(ENDS_WELL.replace("t = torch.ones(2)", second))
    done = distsim_run("--nproc-per-node", "1", "--rings", "rings", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "second: 2 distsim: error: --rings" in done.stdout
    assert "a job that still runs" in done.stdout
