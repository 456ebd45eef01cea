"""Memory of what a call wrote is free when the program lets go of it, however far the host is ahead of the GPU."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
import torch

import distsim
from distsim.sim import RunRequest, run_program
from distsim.sim.device.gpu import Device
from distsim.sim.device.timeline import Mark
from distsim.sim.isolation.process import RankTask

pytestmark = pytest.mark.filterwarnings("ignore")  # the collective has another name since torch 2.13

PROGRAM = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
x = torch.ones(1 << 24, device="cuda")
x_bytes = x.to(torch.float8_e4m3fn).view(torch.uint8)  # values of bytes are kept, if they are known
before = torch.cuda.memory_allocated()
for is_async, part in ((False, x), (True, x), (False, x_bytes), (True, x_bytes)):
    for _ in range(4):
        out = torch.empty(2 * part.numel(), dtype=part.dtype, device="cuda")
        work = dist.all_gather_into_tensor(out, part, async_op=is_async)
        if is_async:
            work.wait()
            assert work.result()[0].shape == out.shape
        del out, work
    held = torch.cuda.memory_allocated() - before
    assert held == 0, f"{held} bytes are held, is_async={is_async}, {part.dtype}"
"""


@pytest.mark.slow
def test_a_calls_output_is_freed_with_its_tensor(tmp_path: Path) -> None:
    """Calls that were waited for, or not asynchronous, keep nothing, as NCCL's do since torch 2.8."""
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = run_program(RunRequest(program=str(tmp_path / "program.py"), on="dgx-h100:1", nproc_per_node=2))
    assert ran.exit_code == 0


LISTS = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
one = torch.ones(1 << 24, device="cuda")
whole = torch.empty(1 << 25, device="cuda")
parts = list(whole.chunk(2))
MiB = 1 << 20


def more(call):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    start.record()
    work = call()
    held = torch.cuda.memory_allocated() - before
    if work is not None:
        work.wait()
        del work
    end.record()
    end.synchronize()
    assert torch.cuda.memory_allocated() == before
    return (torch.cuda.max_memory_allocated() - before) // MiB, held // MiB, start.elapsed_time(end)


for single, listed in (
    (lambda **how: dist.all_gather_into_tensor(whole, one, **how), lambda **how: dist.all_gather(parts, one, **how)),
    (lambda **how: dist.reduce_scatter_tensor(one, whole, **how), lambda **how: dist.reduce_scatter(one, parts, **how)),
):
    at_once, _, quick = more(single)
    flat, after, slow = more(listed)
    assert (at_once, flat, after) == (0, 128, 0), (at_once, flat, after)
    flat, meanwhile, later = more(lambda: listed(async_op=True))
    assert (flat, meanwhile) == (128, 128), (flat, meanwhile)
    copies = 2 * 128 * MiB / 3.35e12 * 1e3
    assert copies < slow - quick < 2 * copies, (quick, slow, copies)
    assert copies < later - quick < 2 * copies, (quick, later, copies)
"""


@pytest.mark.slow
def test_a_list_is_gathered_into_one_tensor_and_copied_from_it(tmp_path: Path) -> None:
    """As torch's ProcessGroupNCCL does (newLikeFlat), until the call was waited for."""
    (tmp_path / "program.py").write_text(LISTS)
    ran = run_program(RunRequest(program=str(tmp_path / "program.py"), on="dgx-h100:1", nproc_per_node=2))
    assert ran.exit_code == 0, ran.diagnosis


UNEVEN = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
parts = list(torch.empty(3, device="cuda").split([2, 1]))
dist.all_gather(parts, torch.ones(2 - dist.get_rank(), device="cuda"))
"""


def test_a_list_of_several_sizes_is_refused_by_name(tmp_path: Path) -> None:
    """NCCL's group has a message for each of them, gloo's an error of its own."""
    (tmp_path / "program.py").write_text(UNEVEN)
    ran = run_program(RunRequest(program=str(tmp_path / "program.py"), on="dgx-h100:1", nproc_per_node=2))
    assert ran.diagnosis is not None
    assert "all_gather of tensors that differ in size is not simulated: pad them" in ran.diagnosis.explanation


BATCHES = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
me = dist.get_rank()
torch.cuda.set_device(me)
most = []
for times in (1, 6):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(times):
        out, there = torch.zeros(1 << 24, device="cuda"), torch.empty(1 << 24, device="cuda")
        both = [dist.P2POp(dist.isend, out, 1 - me), dist.P2POp(dist.irecv, there, 1 - me)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        del both, work, out, there
        assert torch.cuda.memory_allocated() == before
    most.append(torch.cuda.max_memory_allocated() - before)
assert most == [2 << 26, 2 << 26], most
"""


@pytest.mark.slow
def test_a_waited_batch_of_messages_keeps_none_of_its_tensors(tmp_path: Path) -> None:
    """All of them have one handle: who waits for it has waited for each."""
    (tmp_path / "program.py").write_text(BATCHES)
    ran = run_program(RunRequest(program=str(tmp_path / "program.py"), on="dgx-h100:1", nproc_per_node=2))
    assert ran.exit_code == 0


MOVED = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
me = dist.get_rank()
torch.cuda.set_device(me)
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
weights = sum(p.nbytes for p in model.parameters())
begun = torch.cuda.Event(True)
begun.record()
model.cuda()
ended = torch.cuda.Event(True)
ended.record()
print("moved", me, flush=True)
ended.synchronize()
assert begun.elapsed_time(ended) > weights / 11e9 * 1e3, begun.elapsed_time(ended)  # gpus/h100.toml: pageable
dist.barrier()
"""


def test_ranks_move_their_models_to_their_gpus_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in turns, weight by weight: this host would have to hold all of them at a time."""
    (tmp_path / "program.py").write_text(MOVED)
    turns: list[int] = []
    copied = Device.copied_to

    def noted(self: Device, task: RankTask, mark: Mark) -> None:
        turns.append(self.process.rank)
        copied(self, task, mark)

    monkeypatch.setattr(Device, "copied_to", noted)
    ran = run_program(RunRequest(program=str(tmp_path / "program.py"), on="dgx-h100:1", nproc_per_node=4))
    assert ran.exit_code == 0
    assert len(turns) == 4 * 4
    assert len(list(groupby(turns))) == 4


def test_memory_that_is_short_waits_for_what_other_streams_still_use() -> None:
    """torch waits for them before it gives up: 45 GiB that another stream used are free once it is done."""

    def body() -> float:
        one, side = torch.empty(16384, 16384, dtype=torch.bfloat16, device="cuda"), torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(50):
                one @ one
        for _ in range(45):
            torch.empty(1 << 30, dtype=torch.uint8, device="cuda").record_stream(side)
        used = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(60)]
        return len(used) * float(side.query())

    assert distsim.simulate(body, "dgx-h100:1", nproc_per_node=1).results == [60.0]
