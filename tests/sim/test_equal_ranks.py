"""Every rank is traced within a budget; beyond it a sample, and nothing is said of the ranks that did not run."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError
from distsim.report import print_summary
from distsim.report.document import report_document
from distsim.report.html.draw.run import run_parts
from distsim.sim import Outcome, RunRequest, run_program
from distsim.sim.c10d import operations
from distsim.sim.isolation.process import SimProcess, current_task
from distsim.sim.world import traced
from distsim.sim.world.equal_ranks import Sample, Unlike, families, kinds_by_place
from tests.kin import one_in

HEAD = """\
import os, torch, torch.distributed as dist
rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl")
size = dist.get_world_size()
"""
TRAIN = """\
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    {extra}
    model(torch.ones(64, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
"""
STAGES = """\
for first in range(0, size, 4):
    made = dist.new_group(list(range(first, first + 4)))
    if rank in range(first, first + 4):
        group, stage = made, rank - first
weight = torch.ones(256, 256, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(3):
    x = torch.ones(256, 256, device="cuda")
    if stage > 0:
        dist.recv(x, group=group, group_src=stage - 1)
    y = x @ weight
    if stage < 3:
        dist.send(y.detach(), group=group, group_dst=stage + 1)
    y.sum().backward()
    optimizer.step()
    if stage == 3:
        print("step", step)
torch.cuda.synchronize()
"""


def ran(folder: Path, text: str, ranks: str, on: str = "dgx-h100:2") -> tuple[Outcome, str]:
    """A script on simulated H100s, and what it printed. *ranks*: auto, all or sample, as of `--ranks`."""
    script = folder / "train.py"
    script.write_text(HEAD + textwrap.dedent(text))
    return ran_script(script, ranks, on)


def ran_script(script: Path, ranks: str, on: str = "dgx-h100:2") -> tuple[Outcome, str]:
    """The same of a script that stands on its own."""
    out = io.StringIO()
    budget_s = {"auto": 60.0, "all": None, "sample": 0.0}[ranks]
    request = RunRequest(program=str(script), on=on, budget_s=budget_s, sample_is_enough=ranks == "sample")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        outcome = run_program(request)
    return outcome, out.getvalue()


def progress_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets what the line of progress says of the traced ranks at the end of each step."""
    seen: list[str] = []
    ended_step = traced.Traced.ended_step

    def noted(ranks: traced.Traced, process: SimProcess) -> None:
        ended_step(ranks, process)
        seen.append(ranks.progress)

    monkeypatch.setattr(traced.Traced, "ended_step", noted)
    return seen


def shown(outcome: Outcome) -> str:
    """The summary on a terminal."""
    out = io.StringIO()
    print_summary(outcome, out)
    return out.getvalue()


STEP = """\
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, device="cuda"))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with open("lines", "a") as lines:
    print(rank, file=lines)
for step in range(4):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    {each}
{last}
torch.cuda.synchronize()
"""
FAULTS = {
    "raises": ("if step == 2 and rank == 9: raise OSError('disk full')", "", 1, (9,)),
    "its own call": ("if step == 2 and rank == 0: dist.all_reduce(torch.ones(1, device='cuda'))", "", 4, (0,)),
    "another shape": ("dist.all_reduce(torch.ones(8 + (rank % 3 == 1), device='cuda'))", "", 4, (1, 4, 7, 10, 13)),
    "a node raises": ("if step == 2 and rank // 8 == 1: raise OSError('disk full')", "", 1, tuple(range(8, 16))),
    "node leaders meet": ("if local == 0: dist.barrier(device_ids=[local])", "", 4, (0, 8)),
    "leaves out the last": ("", "if rank != 5: dist.all_reduce(torch.ones(8, device='cuda'))", 3, (5,)),
    "a batch less": ("if step == 2 and rank == 11: break", "", 3, (11,)),
    "too large": ("", "big = [torch.empty(3 << 29, device='cuda') for _ in range(32 * (rank == 6))]", 1, (6,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", one_in(2, FAULTS))
def test_the_rank_at_fault_is_named_whichever_it_is(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of 16, or some, does otherwise: by default it is named as with every rank traced, and each rank has run
    exactly once."""
    monkeypatch.chdir(tmp_path)
    each, last, exit_code, culprits = FAULTS[fault]
    for ranks in ("auto", "all"):
        (tmp_path / "lines").unlink(missing_ok=True)
        outcome, _ = ran(tmp_path, STEP.format(each=each or "pass", last=last or "pass"), ranks)
        assert outcome.diagnosis is not None, fault
        if fault != "node leaders meet":
            assert outcome.exit_code == exit_code
            assert outcome.diagnosis.culprits == culprits
        else:
            assert set(outcome.diagnosis.culprits) & set(culprits)
        assert outcome.proof == "all"
        assert sorted(map(int, (tmp_path / "lines").read_text().split())) == list(range(16))


HEALTHY = {
    "ddp": ("pass", "pass"),
    "rank 0 validates": ("if rank == 0: torch.ones(9, device='cuda').add_(1)", "pass"),
    "tp leaders log": ("if local % 4 == 0: print('loss', step)", "pass"),
    "values of their own": ("total = torch.tensor([float(rank)], device='cuda'); dist.all_reduce(total)", "pass"),
}


@pytest.mark.parametrize("program", one_in(2, HEALTHY))
def test_a_healthy_program_is_proven_healthy(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that differ in what they compute, print or bring to calls are traced once, and all finish."""
    monkeypatch.chdir(tmp_path)
    outcome, _ = ran(tmp_path, STEP.format(each=HEALTHY[program][0], last=HEALTHY[program][1]), "auto")
    assert (outcome.exit_code, outcome.proof, outcome.diagnoses) == (0, "all", [])
    assert len(outcome.ranks) == 16
    assert (tmp_path / "lines").read_text().count("\n") == 16


UNREAD = {
    "raises": ("if step == 2 and [r == 9 for r in range(16)][rank]: raise OSError('disk full')", "pass"),
    "leaves out the last": ("pass", "if [r != 5 for r in range(16)][rank]: dist.all_reduce(torch.ones(8).cuda())"),
}
"""Faults of ranks that no test of the program names."""


@pytest.mark.parametrize("fault", UNREAD)
def test_a_sample_vouches_for_nobody_else(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the budget a fault of a rank that does not run is not seen, and the run does not say that it finished."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(traced, "OPERATOR_S", 1.0)
    each, last = UNREAD[fault]
    seen = progress_of_steps(monkeypatch)
    outcome, _ = ran(tmp_path, STEP.format(each=each, last=last), "auto")
    assert outcome.exit_code == 5
    assert not outcome.diagnoses
    assert seen[-1].startswith("3 of 16 ranks traced, step 4 (--ranks all: about ")
    assert run_parts(report_document(outcome)).word == "NOT PROVEN"
    assert [rank.rank for rank in outcome.ranks] == [0, 8, 15]
    text = shown(outcome)
    words = " ".join(text.split())  # however wide the terminal is
    assert words.startswith("NOT PROVEN 3 of 16 ranks were traced; ranks 1-7,9-14 were stopped before the end; ")
    assert "train.py:" in text.partition("(--ranks all")[0]
    assert "\n3 of 16 ranks finished after " in text
    document = report_document(outcome)
    assert (document["proof"], document["exit_code"]) == ("sample", 5)
    assert document["not_traced"] == [*range(1, 8), *range(9, 15)]
    assert [rank["rank"] for rank in document["ranks"]] == [0, 8, 15]
    json.dumps(document)


REDUCES = """\
weight = torch.ones(256, 256, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(4):
    (torch.ones(256, 256, device="cuda") @ weight).sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()
"""
"""Each rank does the same work in a job of any size; DDP asks each rank for its parameters."""


def test_the_estimate_of_all_ranks_counts_those_that_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks run of 16 as of 64; all would take four times as long."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(traced, "OPERATOR_S", 100.0)
    hours = []
    for nodes in (2, 8):
        outcome, _ = ran(tmp_path, REDUCES, "sample", f"dgx-h100:{nodes}")
        found = re.search(r"about (\d+) h of CPU", outcome.unseen)
        assert found is not None, outcome.unseen
        hours.append(int(found[1]))
    assert hours[1] == pytest.approx(4 * hours[0], rel=0.05)


def test_who_asks_for_a_sample_takes_it_for_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--ranks sample: exit code 0, and one line below the figures says all the same who did not run. Progress says
    nothing of a budget, which nobody gave."""
    monkeypatch.chdir(tmp_path)
    seen = progress_of_steps(monkeypatch)
    outcome, _ = ran(tmp_path, STEP.format(each="pass", last="pass"), "sample")
    assert (outcome.exit_code, outcome.is_proven, outcome.proof) == (0, True, "sample")
    text = shown(outcome)
    assert "NOT PROVEN" not in text
    assert "\n3 of 16 ranks finished after " in text
    words = " ".join(text.partition("\ncollectives ")[2].split())
    assert "sample: 3 of 16 ranks were traced; ranks 1-7,9-14 were never run (--ranks all: about " in words
    assert seen[-1].startswith("3 of 16 ranks traced, step 4 (--ranks all: about ")
    assert not any("budget" in line for line in seen)
    assert run_parts(report_document(outcome)).word == "SAMPLE FINISHED"


def test_ranks_are_counted_while_a_sample_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of progress, and a timeout, read the processes from another thread while most of them go."""
    monkeypatch.chdir(tmp_path)
    counting: list[Iterator[SimProcess]] = []

    def counted(*args: Any) -> Sample:
        task = current_task()
        assert task is not None
        counting.extend([iter(task.process.port.rank_processes.values()), iter(task.process.port.processes)])
        assert [next(each).rank for each in counting] == [0, 0]
        return kinds_by_place(*args)

    monkeypatch.setattr(traced, "kinds_by_place", counted)
    script = tmp_path / "train.py"
    script.write_text(HEAD + STEP.format(each="pass", last="pass"))
    outcome = run_program(RunRequest(program=str(script), on="dgx-h100:2", budget_s=0.2))
    assert outcome.proof == "sample"
    assert "stopped before the end" in outcome.unseen
    assert [[process.rank for process in each] for each in counting] == [[*range(1, 16)]] * 2


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("nodes", [2048, 4096])
def test_tens_of_thousands_of_gpus_run(nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the line of progress; the interval of their step says that none of that size was published."""
    (tmp_path / "train.py").write_text(HEAD + STEP.format(each="pass", last="pass"))
    monkeypatch.chdir(tmp_path)
    words = [sys.executable, "-m", "distsim", "run", "--on", f"dgx-h100:{nodes}", "--ranks", "sample", "train.py"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=1200)
    assert (ran.returncode, "Traceback" in ran.stderr) == (0, False), ran.stderr
    text = " ".join(ran.stdout.split())
    assert f"training on {8 * nodes} GPUs" in text
    assert "no measurement at this size: the largest published step has 512 GPUs" in text


def test_a_fault_in_a_sample_is_told_of_ranks_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank leaves out a call: it is named, and of 13 ranks that did not run nothing is said."""
    monkeypatch.chdir(tmp_path)
    last = "if rank != 15: dist.all_reduce(torch.ones(8, device='cuda'))"
    outcome, _ = ran(tmp_path, STEP.format(each="pass", last=last), "sample")
    assert outcome.exit_code == 3
    (told,) = outcome.diagnoses
    assert (told.kind, told.culprits, told.victims) == (Kind.MISSING_RANK, (15,), (0, 8))
    assert outcome.evidence is not None
    assert sorted(outcome.evidence.ranks) == [0, 8, 15]
    text = shown(outcome)
    assert not text.startswith("NOT PROVEN")
    assert "not run: 3 of 16 ranks were traced" in text


def test_spawned_ranks_are_all_traced(tmp_path: Path) -> None:
    """mp.spawn of eight ranks on GPUs of which one raises before its group: that is the report, not an IndexError."""
    script = tmp_path / "spawn.py"
    script.write_text(
        textwrap.dedent("""\
            import os, torch, torch.distributed as dist, torch.multiprocessing as mp
            def worker(rank, world):
                os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
                torch.cuda.set_device(rank)
                if rank == 1:
                    raise ValueError("before the group")
                dist.init_process_group("nccl", rank=rank, world_size=world)
                dist.all_reduce(torch.ones(4, device=rank))
                dist.destroy_process_group()
            if __name__ == "__main__":
                mp.spawn(worker, args=(8,), nprocs=8, join=True)
            """)
    )
    outcome, _ = ran_script(script, "auto", "dgx-h100:1")
    assert outcome.exit_code == 1
    assert outcome.failures[0].type == "ValueError"
    assert outcome.failures[0].ranks == (1,)
    script.write_text(script.read_text().replace("rank == 1:", "rank == 99:"))
    outcome, _ = ran_script(script, "auto", "dgx-h100:1")
    assert (outcome.exit_code, outcome.world_size, outcome.proof) == (0, 8, "all")


def test_rank_0_that_works_alone_uses_up_no_budget_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 does for all, as it loads a checkpoint, is counted once, and not for each rank."""
    monkeypatch.setattr(traced, "OPERATOR_S", 0.1)
    alone = "if rank == 0:\n    for _ in range(200):\n        torch.ones(9, device='cuda').add_(1)\n"
    text = alone + "dist.barrier(device_ids=[local])\n"
    outcome, _ = ran(tmp_path, text, "auto")
    assert (outcome.exit_code, outcome.proof) == (0, "all")


def test_the_budget_is_counted_and_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has been traced for as long as the budget allows is one of few from then on, and those that had
    begun are left out of the report."""
    monkeypatch.setattr(traced, "OPERATOR_S", 60.0 / 16 / 100)
    text = TRAIN.format(extra="[torch.ones(9, device='cuda') for _ in range(50)]; dist.barrier(device_ids=[local])")
    first, _ = ran(tmp_path, text, "auto")
    again, _ = ran(tmp_path, text, "auto")
    assert first.proof == again.proof == "sample"
    assert report_document(first) == report_document(again)


def test_a_program_on_the_host_is_traced_on_every_rank(tmp_path: Path) -> None:
    """Data on CPU tensors are each rank's own and exact, also where torch asks for the GPU's current stream, as Adam
    does at each step, or the program waits for a GPU that it does not use."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""\
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            weight = torch.nn.Parameter(torch.zeros(4))
            optimizer = torch.optim.Adam([weight])
            for step in range(3):
                weight.sum().backward()
                optimizer.step()
                torch.cuda.synchronize()
                total = torch.tensor([float(dist.get_rank())])
                dist.all_reduce(total)
            if dist.get_rank() == 0:
                print("total", total.item())
            """)
    )
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        outcome = run_program(RunRequest(program=str(script), on="dgx-h100:2"))
    assert "total 120.0" in out.getvalue()
    assert outcome.training is None
    assert outcome.notes == []


def test_a_sample_has_the_ends_of_each_kind() -> None:
    """Of a single kind the first, the middle and the last; of several the first and the last of each."""
    assert Sample([0] * 9).traced == {0, 4, 8}
    assert Sample([0, 1] * 16).traced == {0, 1, 30, 31}
    few = Sample([0] * 9)
    few.leave_middle_out()
    assert few.traced == {0, 8}
    assert few.standing_for(range(9)) == [0] * 8 + [8]


def test_a_member_arrives_for_those_of_its_kind() -> None:
    """In each group a traced rank stands for all of its kind; a kind that nobody of the group traces is an error."""
    sample = Sample([0, 1] * 16)
    assert sample.standing_for((0, 2, 4, 30)) == [0, 0, 0, 3]
    assert sample.standing_for((0, 1, 2, 3)) == [0, 1, 0, 1]
    assert sample.stands_for(0) == list(range(0, 30, 2))
    assert sample.stands_for(30) == [30]
    with pytest.raises(Unlike):
        sample.standing_for((0, 3))


def test_places_in_groups_make_kinds() -> None:
    """Ranks of one place in their pipelines are a kind; those in no pipeline are one, too."""
    sample = Sample([0] * 9).split({rank: rank % 4 for rank in range(8)}, "pipelines")
    assert sample.kinds == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert families([(0, 1), (2, 3), (0, 2), (1, 3)]) == [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]
    assert families([(0, 2, 4, 6), (0, 6), (1, 3, 5, 7), (1, 7)]) == [[(0, 2, 4, 6), (1, 3, 5, 7)], [(0, 6), (1, 7)]]
    assert kinds_by_place(4, [((0, 1), "a"), ((2, 3), "b")]).kinds == [0, 1, 0, 1]


def test_a_sample_has_whole_pipelines() -> None:
    """Who sends to a traced rank is traced; of other groups with a traced member a rank of each kind is."""
    sample = Sample([0, 0, 0, 1, 1, 1])
    sample.complete([(2, 4)], [(0, 1), (3, 4)])
    assert sample.traced == {0, 1, 2, 3, 4, 5}
    sample = Sample([0] * 6 + [1] * 6)
    sample.complete([(0, 7, 8)], [])
    assert sample.traced == {0, 5, 6, 7, 8, 11}


@pytest.mark.parametrize("alone", ["rank > 0", "rank < size - 1"])
def test_the_rank_that_does_otherwise_stands_for_itself(alone: str, tmp_path: Path) -> None:
    """The first or the last rank computes more between its calls than the two others: the figures are theirs."""
    extra = f"x = torch.ones(2048, 2048, device='cuda'); [x @ x for _ in range(4 - 4 * ({alone}))]"
    outcome, _ = ran(tmp_path, TRAIN.format(extra=extra), "sample")
    assert outcome.training is not None
    stands = {rank.rank: len(rank.like) for rank in outcome.training.ranks}
    assert stands == ({0: 1, 8: 14, 15: 1} if alone == "rank > 0" else {0: 14, 8: 1, 15: 1})
    odd = 0 if alone == "rank > 0" else 15
    assert any(
        note.startswith(f"rank {odd} of ranks 0,8,15 ran different operators or calls") for note in outcome.notes
    )
    assert "(for 13 more)" in shown(outcome)


def test_a_sample_takes_as_long_as_all(tmp_path: Path) -> None:
    """DDP on 16 GPUs takes the same virtual time and moves the same bytes, with three ranks traced and with all."""
    few, _ = ran(tmp_path, TRAIN.format(extra="pass"), "sample")
    every, _ = ran(tmp_path, TRAIN.format(extra="pass"), "all")
    assert len(few.ranks) == 3
    assert len(every.ranks) == 16
    assert few.virtual_time_s == pytest.approx(every.virtual_time_s, rel=1e-9)
    assert [(t.op, t.count, t.bytes) for t in few.collectives] == [(t.op, t.count, t.bytes) for t in every.collectives]


@pytest.mark.parametrize("ranks", ["auto", "sample"])
def test_stages_of_a_pipeline_are_kinds(ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends to whom decides who is traced, whether they have sent already when the budget ends or the run begins
    anew for it; a line is shown once, and what the first attempt wrote is gone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(traced, "OPERATOR_S", 0.1)
    text = 'with open("begun", "a") as begun:\n    print(rank, file=begun)\n'
    text += "import subprocess\nsubprocess.run(['make', '--version'], capture_output=True)\n" * (ranks == "sample")
    text += STAGES.replace("range(3)", "range(20)")
    few, out = ran(tmp_path, text, ranks, "dgx-h100:4")
    begun = (tmp_path / "begun").read_text().split()
    every, _ = ran(tmp_path, text, "all", "dgx-h100:4")
    assert few.virtual_time_s == pytest.approx(every.virtual_time_s, rel=1e-9)
    assert [summary.rank for summary in few.ranks] == [0, 1, 2, 3, 28, 29, 30, 31]
    assert len(begun) == len(set(begun)) == (8 if ranks == "sample" else 32)
    assert any("the simulation restarted" in note for note in few.notes) == (ranks == "sample")
    assert len(re.findall(r"\[ 3\] step", out)) == 20


def test_pipelines_that_are_made_in_turns_with_other_groups_are_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron makes the stages of a pipeline a group, then their ends, and then both of the next pipeline. A rank that
    the program names is traced with its pipeline after a restart, too."""
    monkeypatch.chdir(tmp_path)
    ends = "    dist.new_group([first, first + 3])\n"
    text = STAGES.replace("    if rank in range(first", f"{ends}    if rank in range(first", 1)
    few, _ = ran(tmp_path, f"{text}if rank == 9:\n    torch.cuda.synchronize()\n", "sample", "dgx-h100:4")
    assert [summary.rank for summary in few.ranks] == [0, 1, 2, 3, 8, 9, 10, 11, 28, 29, 30, 31]
    assert sum("the simulation restarted" in note for note in few.notes) == 1


def test_stages_of_a_mesh_are_kinds(tmp_path: Path) -> None:
    """Its groups are parts of the default group where that has a device_id: who is traced is the same."""
    script = tmp_path / "train.py"
    stages = STAGES[STAGES.index("weight =") :]
    mesh = 'mesh = init_device_mesh("cuda", (size // 4, 4))\ngroup, stage = mesh.get_group(1), rank % 4\n'
    head = "from torch.distributed.device_mesh import init_device_mesh\n" + HEAD
    script.write_text(head.replace('"nccl"', '"nccl", device_id=torch.device("cuda", local)') + mesh + stages)
    few, _ = ran_script(script, "sample", "dgx-h100:4")
    assert [summary.rank for summary in few.ranks] == [0, 1, 2, 3, 28, 29, 30, 31]


@pytest.mark.parametrize(
    "effect",
    ["os.rename('there', 'here')", "open('there', 'w').close()", "__import__('subprocess').run(['touch', 'there'])"],
)
def test_what_cannot_be_taken_back_is_not_done_twice(
    effect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that has changed a file of somebody else's does not begin anew: the user hears why, and what to do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("precious")
    with pytest.raises(UsageError, match=r"only ranks 0,16,31 are traced.* --ranks all traces every rank"):
        ran(tmp_path, f"if rank == 0: {effect}\n" + STAGES, "sample", "dgx-h100:4")


@pytest.mark.parametrize("late", ["", "dist.barrier(device_ids=[local])\n"], ids=["before its group", "after it"])
def test_ranks_that_compute_long_on_the_host_use_up_the_budget(
    late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight models on one host take long: once a second rank makes its own, only a sample goes on."""
    monkeypatch.setattr(traced, "HOST_FACTOR", 1e5)
    model = (
        'weights = torch.ones(1 << 20)\nfor _ in range(20):\n    weights.normal_()\nprint("a model on rank", rank)\n'
    )
    if late:
        text = HEAD + model + late
    else:
        text = HEAD.splitlines(keepends=True)[0] + 'rank = int(os.environ["RANK"])\n' + model + HEAD
    script = tmp_path / "train.py"
    script.write_text(text + 'dist.all_reduce(torch.ones(3, device="cuda"))\n')
    outcome, out = ran_script(script, "auto", "dgx-h100:1")
    assert outcome.exit_code == 5
    assert sorted(re.findall(r"a model on rank (\d+)", out)) == ["0", "4", "7"]


def test_calls_meet_when_some_of_their_ranks_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of eight have arrived when the budget ends: the time is that of all."""
    monkeypatch.setattr(traced, "OPERATOR_S", 60.0 / 8 / 70)
    text = TRAIN.format(extra="[torch.ones(9, device='cuda') for _ in range(30)]; dist.barrier(device_ids=[local])")
    few, _ = ran(tmp_path, text, "auto", "dgx-h100:1")
    every, _ = ran(tmp_path, text, "all", "dgx-h100:1")
    assert [len(run.ranks) for run in (few, every)] == [3, 8]
    assert few.virtual_time_s == pytest.approx(every.virtual_time_s, rel=1e-9)


def test_values_of_their_own_are_summed_right(tmp_path: Path) -> None:
    """What ranks bring to a collective is theirs: the sum of their numbers is not one number many times."""
    text = """\
    x = torch.tensor([float(rank)], device="cuda")
    dist.all_reduce(x)
    if rank == 0:
        print("sum", x.item())
    """
    _, out = ran(tmp_path, text, "auto")
    assert "sum 120.0" in out
    assert out.count("sum") == 1
    outcome, _ = ran(tmp_path, text, "sample")
    assert any(note.startswith("ranks pass different values to collectives") for note in outcome.notes)


def test_what_a_rank_scatters_or_gathers_is_its_own(tmp_path: Path) -> None:
    """Who stands for others gets its own part, over NCCL and gloo, also of a root that nobody would have traced."""
    text = """\
    on_host = dist.new_group(backend="gloo")
    scatters, gathers = ([r == root for r in range(size)][rank] for root in (5, 3))
    for device, group in (("cuda", None), ("cpu", on_host)):
        got = torch.zeros(2, device=device)
        parts = [torch.full((2,), 7.0, device=device) for place in range(size)]
        parts[0] += 1
        dist.scatter(got, parts if scatters else None, src=5, group=group)
        whole = torch.zeros(size * 2, device=device)
        dist.all_gather_single(whole, got, group=group)
        parts = [torch.zeros(2, device=device) for _ in range(size)] if gathers else None
        dist.gather(got, parts, dst=3, group=group)
        if rank == 0:
            print(device, got.tolist(), whole.sum().item())
    """
    outcome, out = ran(tmp_path, text, "sample")
    assert outcome.exit_code == 0
    assert "cuda [8.0, 8.0] 226.0" in out
    assert "cpu [8.0, 8.0] 226.0" in out


def test_a_gather_of_many_costs_what_one_does(tmp_path: Path) -> None:
    """Each of 1,024 ranks hears a number from each; three are traced, and nothing is computed for the others."""
    text = """\
    mine = torch.ones(1, device="cuda", dtype=torch.int64)
    theirs = [torch.zeros_like(mine) for _ in range(size)]
    dist.all_gather(theirs, mine)
    optimizer = torch.optim.SGD([torch.ones(1, device="cuda", requires_grad=True)], lr=0.1)
    optimizer.step()
    if rank == 0:
        print("sum", sum(theirs).item())
    """
    copied: list[int] = []
    real = operations.copy_into
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "copy_into", lambda *ends: copied.append(1) or real(*ends))
        _, out = ran(tmp_path, text, "auto", "dgx-h100:128")
    assert "sum 1024" in out
    assert len(copied) <= 4 * 1024
