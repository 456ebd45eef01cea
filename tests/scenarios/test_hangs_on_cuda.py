"""scenarios/hangs with CUDA tensors and NCCL: who is to blame does not depend on where the tensors are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from distsim.scenario import find_scenarios, load_scenario, run_scenario

ROOT = Path(__file__).parents[2] / "scenarios"
FILES = find_scenarios([ROOT / "hangs"])
ON_GPU = (
    'import torch; torch.set_default_device("cuda"); '
    'torch.cuda.set_device(int(__import__("os").environ["LOCAL_RANK"])); '
    'dist.init_process_group("nccl"'
)
SUITE = {"wrong_order", "shape_mismatch", "crossed_recvs", "skipped_in_the_middle"}
OTHERWISE = {
    "monitored_barrier": "NCCL has none",
    "os_exit": "the host is ahead of its kernels: the rank is gone before its first call",
    "sys_exit_3": "the host is ahead of its kernels: the rank is gone before its first call",
    "set_order": "the host is ahead of its kernels: later calls show that the order differs (wrong_order)",
    "timeout": "the time limit of NCCL's watchdog, which kills the process, is not simulated",
    "timeout_caught": "an error of NCCL's watchdog cannot be caught",
    "two_threads_one_group": "torch.set_default_device is of one thread",
    "polls_a_tensor": "a loop that reads a GPU is not seen to be stuck yet",
}
"""What is another program, or ends otherwise, on GPUs."""

pytestmark = pytest.mark.filterwarnings("ignore")  # a program's warnings are its own


def moved(path: Path, folder: Path) -> Path:
    """A copy of the scenario at *path* whose ranks are on the GPUs of one node; every line keeps its number."""
    for source in path.parent.glob("*.py"):
        shutil.copy(source, folder)
    program = folder / f"{path.stem}.py"
    text = program.read_text().replace('dist.init_process_group("gloo"', ON_GPU)
    program.write_text(text.rstrip("\n") + "\n__import__('torch').cuda.synchronize()\n")
    copy = folder / path.name
    copy.write_text(path.read_text().replace("ethernet-cpu:2", "dgx-h100:1").replace("per_node = 2", "per_node = 4"))
    return copy


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=() if p.stem in SUITE else pytest.mark.soak) for p in FILES],
)
def test_hang_is_named(path: Path, tmp_path: Path) -> None:
    """The first diagnosis is the one that the scenario expects of tensors on the host."""
    if path.stem in OTHERWISE:
        pytest.skip(OTHERWISE[path.stem])
    result = run_scenario(load_scenario(moved(path, tmp_path)))
    if not result.passed:
        pytest.fail(f"{path.name}:\n{result.text}", pytrace=False)
