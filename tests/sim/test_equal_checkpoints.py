"""torch.distributed.checkpoint where a sample of the ranks is traced: each has its own part of what is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.sim import Outcome
from distsim.sim.run import RunRequest, run_program

HEAD = """\
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("cpu:gloo,cuda:nccl")
torch.cuda.set_device(dist.get_rank() % 8)
with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(2)])
"""
SHARDED = "fully_shard(model)\n"
HYBRID = 'fully_shard(model, mesh=init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard")))\n'
REPLICATED = ""
TRAIN = """\
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    for parameter in model.parameters():
        if not hasattr(parameter.grad, "device_mesh"):
            dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    if step in {steps}:
        state = dict(zip("mo", get_state_dict(model, optimizer)))
        {save}
    torch.cuda.synchronize()
"""
SAVE = 'dcp.save(state, checkpoint_id=f"{folder}/{step}")'
SAVE_BESIDE = 'dcp.async_save(state, checkpoint_id=f"{folder}/{step}").result()'


def _ran(folder: Path, how: str, save: str, steps: str, equal: bool) -> Outcome:
    script = folder / "train.py"
    files = folder / ("once" if equal else "each")
    train = TRAIN.replace("{steps}", steps).replace("{save}", save)
    script.write_text(f"folder = {str(files)!r}\n{HEAD}{how}{train}")
    return run_program(RunRequest(program=str(script), on="dgx-h100:2", budget_s=0.0 if equal else None))


@pytest.mark.parametrize(
    "how",
    [pytest.param(SHARDED, marks=pytest.mark.soak), HYBRID, pytest.param(REPLICATED, marks=pytest.mark.soak)],
    ids=["sharded", "hybrid", "replicated"],
)
def test_a_rank_writes_its_own_part(tmp_path: Path, how: str) -> None:
    """As much as where every rank is traced, in the same time, and nobody fails to have the others' parts; also where
    it saves while ranks are compared."""
    once, each = (_ran(tmp_path, how, SAVE, "(0, 3)", equal) for equal in (True, False))
    for outcome in (once, each):
        assert not outcome.failures
        assert not outcome.diagnoses
    assert not each.unseen
    assert "ranks 1-7,9-14" in once.unseen, once.notes
    assert any("checkpoint" in note for note in once.notes)
    one, other = once.training.saved, each.training.saved
    assert one.written_bytes == pytest.approx(other.written_bytes, rel=0.1)
    # A rank of the sample that stands for no other knows of no copy of its part: it writes it whole.
    assert once.virtual_time_s == pytest.approx(each.virtual_time_s, rel=0.1 if how != HYBRID else 0.7)


def test_a_thread_that_saves_does_not_make_ranks_unequal(tmp_path: Path) -> None:
    """What it does between the steps of the main thread is compared with nobody's."""
    outcome = _ran(tmp_path, SHARDED, SAVE_BESIDE, "(0, 1, 2, 3)", True)
    assert not outcome.failures
    assert "ranks 1-7,9-14" in outcome.unseen, outcome.notes


def test_parts_come_back(tmp_path: Path) -> None:
    """Loaded by the rank that wrote them, of whose kind all are."""
    again = SAVE + '; dcp.load(state, checkpoint_id=f"{folder}/{step}")'
    outcome = _ran(tmp_path, SHARDED, again, "(3,)", True)
    assert not outcome.failures
    assert outcome.training.saved.reads
