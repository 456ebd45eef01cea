"""Large jobs: ranks are made when they are needed, and their groups, links and reports cost little."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.errors import UsageError
from distsim.report.document import report_document
from distsim.sim.isolation.process import SimProcess
from distsim.sim.kernel import baton
from tests.sim.test_equal_ranks import STAGES, ran, ran_script, shown

GLOO = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
loss = torch.tensor([float(dist.get_rank())])
dist.all_reduce(loss)
if dist.get_rank() == 0:
    print("loss", loss.item())
"""


def test_a_job_on_cpu_tensors_runs_all_ranks_of_a_gpu_cluster(tmp_path: Path) -> None:
    """A sample is of ranks that use GPUs: with gloo every rank runs, and the sum is that of all."""
    script = tmp_path / "train.py"
    script.write_text(GLOO)
    for ranks in ("sample", "all"):
        outcome, printed = ran_script(script, ranks, "dgx-h100:8")
        assert (outcome.exit_code, outcome.not_traced, len(outcome.ranks)) == (0, (), 64)
        assert "loss 2016.0" in printed


def test_no_rank_is_made_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16,384 ranks three are made, and the report says of the others that they never ran."""
    made = []
    init = SimProcess.__init__

    def counted(self: SimProcess, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        made.append(self.rank)

    monkeypatch.setattr(SimProcess, "__init__", counted)
    outcome, _ = ran(tmp_path, "dist.all_reduce(torch.ones(8, device='cuda'))", "sample", "dgx-h100:2048")
    assert (outcome.exit_code, made) == (0, [0, 8192, 16383])
    assert "ranks 1-8191,8193-16382 were never run" in outcome.unseen


MESH = """\
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cuda", (1, size // 8, 8), mesh_dim_names=("one", "dp", "tp"))
made = [dist.new_group(list(range(first, size, 4))) for first in range(4)]
groups = [mesh.get_group(name) for name in ("one", "dp", "tp")] + [made[rank % 4]]
for group in groups:
    dist.all_reduce(torch.ones(4, device="cuda"), group=group)
if rank in (0, size - 1):
    print("groups", [(group.group_name, sum(dist.get_process_group_ranks(group))) for group in groups])
"""


def test_groups_of_a_mesh_have_torchs_names_and_numbers(tmp_path: Path) -> None:
    """Each rank makes its own alone, and its names and numbers of calls are those of a rank that makes all."""
    seen = {}
    for ranks in ("sample", "all"):
        outcome, printed = ran(tmp_path, MESH, ranks, "dgx-h100:3")
        assert outcome.exit_code == 0
        assert "[ 0] groups [('1', 0), ('25', 24), ('33', 28), ('36', 60)]" in printed
        assert "[23] groups [('24', 23), ('32', 45), ('35', 156), ('39', 78)]" in printed
        seen[ranks] = {rank: [(c.op, c.seq, c.new_ranks) for c in outcome.records[rank]] for rank in (0, 12, 23)}
    assert seen["sample"] == seen["all"]
    assert [seq for op, seq, _ in seen["all"][23] if op == "new_group"] == [24, 32, 35, 36, 37, 38, 39]


OTHER_MESH = """\
from torch.distributed.device_mesh import DeviceMesh
rows = torch.arange(size).view(-1, 4)
if rank == 5:
    rows = rows.flip(0)
DeviceMesh("cuda", rows)
"""


def test_a_rank_with_another_mesh_is_named(tmp_path: Path) -> None:
    """The groups of its mesh are the same in another order: the members of its group wait for it."""
    outcome, _ = ran(tmp_path, OTHER_MESH, "all", "dgx-h100:1")
    assert outcome.exit_code in (3, 4)
    assert outcome.diagnoses[0].culprits == (5,)


def test_links_used_alike_are_one_in_a_large_report(tmp_path: Path) -> None:
    """The bytes and the numbers of all links are those of the report that has each."""
    text = "dist.all_reduce(torch.ones(1 << 20, device='cuda'))\ntorch.cuda.synchronize()"
    small, _ = ran(tmp_path, text, "sample", "dgx-h100:16")
    large, _ = ran(tmp_path, text, "sample", "dgx-h100:256")
    assert all(link.alike == 1 for link in small.links)
    assert len(large.links) < 100
    for kind in {link.kind for link in small.links}:
        counts = [sum(link.alike for link in outcome.links if link.kind == kind) for outcome in (small, large)]
        assert counts[1] == 16 * counts[0]


LOOP = """\
groups = [dist.new_group(list(range(first, first + 2))) for first in range(0, size, 2)]
whole = dist.new_group()
pair = groups[rank // 2]
dist.all_reduce(torch.ones(4, device="cuda"), group=pair)
try:
    dist.new_group([1, size])
except ValueError as error:
    print("refused", error)
if rank == 0:
    print("groups", pair.group_name, whole.group_name, sum(g is dist.GroupMember.NON_GROUP_MEMBER for g in groups))
"""


def test_groups_of_others_are_counted_and_recorded(tmp_path: Path) -> None:
    """A rank that is no member has the call on record, and later groups have torch's names."""
    outcome, printed = ran(tmp_path, LOOP, "all", "dgx-h100:1")
    assert "[0] groups 1 5 3" in printed
    assert "refused Rank 8 is out of range" in printed
    made = [(c.seq, c.new_ranks) for c in outcome.records[7] if c.op == "new_group"]
    assert made[:4] == [(1, (0, 1)), (2, (2, 3)), (3, (4, 5)), (4, (6, 7))]


STEPS = """\
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, device="cuda"))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(2):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
torch.cuda.synchronize()
"""


def test_a_large_report_has_ranges_and_a_wider_interval(tmp_path: Path) -> None:
    """From 4,096 ranks on those that did not run are ranges, and the interval says that none so large is published."""
    for nodes, expected in ((8, [*range(1, 32), *range(33, 63)]), (512, [[1, 2047], [2049, 4094]])):
        outcome, _ = ran(tmp_path, STEPS, "sample", f"dgx-h100:{nodes}")
        document = report_document(outcome)
        assert document["not_traced"] == expected
        assert ("no measurement at this size" in shown(outcome)) == (nodes == 512)


def test_ranks_without_memory_are_refused_before_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says how much all ranks need, how much is left, and what to do."""
    script = tmp_path / "train.py"
    script.write_text(GLOO)
    monkeypatch.setattr(baton, "RANK_BYTES", 1 << 40)
    with pytest.raises(UsageError, match=r"^63 ranks need at least 69269 GB of memory, and this machine has .* sample"):
        ran_script(script, "all", "dgx-h100:8")


def test_loops_over_thousands_of_groups_are_counted(tmp_path: Path) -> None:
    """Beyond 512 ranks a rank has its own groups alone on record, under their numbers, and stages are told apart."""
    outcome, printed = ran(tmp_path, STAGES + "print(rank, dist.new_group().group_name)", "sample", "dgx-h100:128")
    assert outcome.exit_code == 0
    assert sorted(outcome.records) == [0, 1, 2, 3, 1020, 1021, 1022, 1023]
    made = {rank: [call.seq for call in calls if call.op == "new_group"] for rank, calls in outcome.records.items()}
    assert made[0] == [1, 257]
    assert made[1023] == [256, 257]
    assert "1023 257" in printed
