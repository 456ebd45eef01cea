"""Where the records of a real job go: a full disk, a folder in use. The job goes on, or is refused, in a line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import distsim_run

from distsim.cli import main
from distsim.debug.evidence.processes import look, own_process

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


@pytest.mark.soak
def test_no_room_at_all(tmp_path: Path) -> None:
    """On a full disk, the job runs without a guard, and one line says so."""
    (tmp_path / "train.py").write_text(ENDS_WELL.replace("    time.sleep(0.2)\n", ""))
    with small_disk(tmp_path / "disk", 64) as disk:
        with pytest.raises(OSError, match="No space"):
            (disk / "filling").write_bytes(bytes(1 << 20))
        done = distsim_run("--nproc-per-node", "1", "--rings", str(disk / "rings"), "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("distsim:")]
    assert len(said) == 1, done.stderr
    assert "runs without a guard" in said[0]


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second job that is sent to a running one's folder is refused by name, and leaves all there as it is."""
    (tmp_path / "train.py").write_text(ENDS_WELL)
    rings = tmp_path / "rings"
    rings.mkdir(mode=0o700)
    (rings / "rank00000.a0.ring").write_bytes(b"a ring")
    with subprocess.Popen(["sleep", "600"]) as first:
        process = look(first.pid)
        assert process is not None
        said = {**own_process(), "pid": first.pid, "start": process.start_ticks}
        (rings / "launcher.json").write_text(json.dumps(said))
        there = {path: path.read_bytes() for path in rings.iterdir()}
        code = main(["run", "--on", "gloo", "--rings", str(rings), str(tmp_path / "train.py")])
        first.kill()
    (told,) = capsys.readouterr().err.splitlines()
    assert (code, told.partition(" /")[0]) == (2, "distsim: error: --rings")
    assert f"a job that still runs (pid {first.pid})" in told
    assert {path: path.read_bytes() for path in rings.iterdir()} == there
