"""Memory of what a call wrote is free when the program lets go of it, however far the host is ahead of the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.sim import RunRequest, run_program

pytestmark = pytest.mark.filterwarnings("ignore")  # the collective has another name since torch 2.13

PROGRAM = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
x = torch.ones(1 << 24, device="cuda")
before = torch.cuda.memory_allocated()
for is_async in (False, True):
    for _ in range(4):
        out = torch.empty(1 << 25, device="cuda")
        work = dist.all_gather_into_tensor(out, x, async_op=is_async)
        if is_async:
            work.wait()
            assert work.result()[0].shape == out.shape
        del out, work
    held = torch.cuda.memory_allocated() - before
    assert held == 0, f"{held} bytes are held, is_async={is_async}"
"""


@pytest.mark.slow
def test_a_calls_output_is_freed_with_its_tensor(tmp_path: Path) -> None:
    """Calls that were waited for, or not asynchronous, keep nothing, as NCCL's do since torch 2.8."""
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = run_program(RunRequest(program=str(tmp_path / "program.py"), on="dgx-h100:1", nproc_per_node=2))
    assert ran.exit_code == 0
