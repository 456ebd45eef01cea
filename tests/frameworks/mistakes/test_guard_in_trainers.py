"""`distsim.guard()` as one line of a trainer, without distsim's launcher: the report on gloo names the user's line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
GUARD = "distsim.guard(on_hang='abort', hang_after_s=60, report={report!r})"
LINES = {
    "lightning": ("        devices=2,\n", "        devices=2,\n        callbacks=[GUARD],\n"),
    "transformers": ("callbacks=[Report()]", "callbacks=[Report(), GUARD]"),
    "accelerate": ("def main():\n", "def main():\n    GUARD\n"),
}
"""For each framework: what of its planted mistake's program is replaced by what."""
RAY = """\
import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train():
    import distsim

    GUARD
    x = torch.ones(4)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        dist.all_reduce(x)  # <- culprit
    dist.barrier()


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    run = RunConfig(storage_path={folder!r})
    TorchTrainer(
        train, scaling_config=ScalingConfig(num_workers=2), torch_config=TorchConfig(backend="gloo"), run_config=run
    ).fit()
"""
pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(400)]


def run(program: Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "DISTSIM"))}
    environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0"}
    return subprocess.run(
        [sys.executable, *launcher, str(program)],
        cwd=program.parent,
        env=environ,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def verdict(program: Path, report: Path) -> tuple[list[int], bool]:
    """The culprits of the report, and whether it names the marked line for them."""
    first = json.loads(report.read_text())["diagnoses"][0]
    (line,) = [n for n, text in enumerate(program.read_text().splitlines(), 1) if "# <- culprit" in text]
    return first["culprits"], first["sites"]["0"]["line"] == line


@pytest.mark.parametrize("framework", LINES)
def test_a_trainer_is_guarded_by_one_line(framework: str, tmp_path: Path) -> None:
    """torchrun starts the program, and the guard's report names rank 0 at the marked line."""
    pytest.importorskip(framework)
    (mistake,) = HERE.glob(f"{framework}_*_on_one_rank.py")
    before, after = LINES[framework]
    report, text = tmp_path / "report.json", mistake.read_text()
    assert text.count(before) == 1
    guard = GUARD.format(report=str(report))
    program = tmp_path / mistake.name
    program.write_text(
        text.replace("import torch\n", "import torch\nimport distsim\n", 1).replace(
            before, after.replace("GUARD", guard)
        )
    )
    done = run(program, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert report.exists(), done.stdout + done.stderr
    assert verdict(program, report) == ([0], True)


def test_ray_trains_workers_are_guarded_by_one_line(tmp_path: Path) -> None:
    """The line stands first in train_loop_per_worker, behind Ray's own init_process_group."""
    pytest.importorskip("ray.train")
    report, program = tmp_path / "report.json", tmp_path / "train.py"
    guard = GUARD.format(report=str(report))
    program.write_text(RAY.replace("{folder!r}", repr(str(tmp_path / "results"))).replace("GUARD", guard))
    done = run(program)
    assert report.exists(), done.stdout + done.stderr
    assert verdict(program, report) == ([0], True)


def test_a_job_of_one_process_is_told(tmp_path: Path) -> None:
    """A callback in a job without torch.distributed says so in a line, and the job trains."""
    pytest.importorskip("transformers")
    text = (HERE / "transformers_callback_on_one_rank.py").read_text()
    program = tmp_path / "alone.py"
    program.write_text(
        text.replace("[Report()]", "[distsim.guard()]").replace("import torch\n", "import torch\nimport distsim\n", 1)
    )
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert "distsim.guard: this job has no process group, so there is nothing to watch" in done.stdout + done.stderr
