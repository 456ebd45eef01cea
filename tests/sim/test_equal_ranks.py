"""Ranks that do the same on simulated GPUs are traced once, and nothing of what is told depends on that."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.report import print_summary
from distsim.sim import Outcome, RunRequest, run_program
from distsim.sim.c10d import operations
from distsim.sim.world import equal_ranks
from distsim.sim.world.equal_ranks import Difference, EqualRanks, Unlike, families

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
    """A script on simulated H100s, and what it printed."""
    script = folder / "train.py"
    script.write_text(HEAD + textwrap.dedent(text))
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        outcome = run_program(RunRequest(program=str(script), on=on, trace_equal_once=ranks == "equal"))
    return outcome, out.getvalue()


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


def test_a_member_arrives_for_those_of_its_kind() -> None:
    """In each group a traced rank stands for all of its kind; a kind that nobody of the group traces is an error."""
    equal = EqualRanks([0, 1] * 16)
    assert equal.leaders == {0: 0, 1: 1}
    assert equal.doubles == {0: [30], 1: [31]}
    assert equal.standing_for((0, 2, 4, 30), equal.traced) == [0, 0, 0, 3]
    assert equal.standing_for((0, 1, 2, 3), equal.traced) == [0, 1, 0, 1]
    with pytest.raises(Unlike):
        equal.standing_for((0, 3), equal.traced)


def test_of_a_few_ranks_all_are_compared() -> None:
    """Eight ranks are each other's doubles; of nine the last."""
    assert EqualRanks.of_one_kind(8).doubles == {0: [1, 2, 3, 4, 5, 6, 7]}
    assert EqualRanks.of_one_kind(9).doubles == {0: [8]}


def test_places_in_groups_make_kinds() -> None:
    """Ranks of one place in their pipelines are a kind; those in no pipeline are one, too."""
    equal = EqualRanks.of_one_kind(9).split({rank: rank % 4 for rank in range(8)}, "pipelines")
    assert list(equal.kinds) == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert families([(0, 1), (2, 3), (0, 2), (1, 3)]) == [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]


def test_ranks_with_the_same_calls_and_other_shapes() -> None:
    """A double whose operators differ stands for itself alone; one whose calls differ can stand for nobody."""

    def met(nbytes: int, operator: int) -> EqualRanks:
        equal = EqualRanks.of_one_kind(100)
        for rank, moved, number in ((0, 8, 1), (99, nbytes, operator)):
            record: Any = SimpleNamespace(op="all_reduce", nbytes=moved, group=SimpleNamespace(ranks=range(100)))
            equal.saw_operator(rank, number)
            equal.saw_call(rank, record, None)
            equal.ended_step(rank)
        return equal

    assert met(8, 1).difference() is None
    assert met(16, 1).difference() == Difference(0, 99, 1, same_calls=False)
    equal = met(8, 2)
    assert equal.difference() == Difference(0, 99, 1, same_calls=True)
    equal.own.add(99)
    assert equal.difference() is None
    equal.calls[99] = 0
    equal.ended_step(0)
    equal.ended_step(99)
    assert equal.difference() == Difference(0, 99, 2, same_calls=False)


@pytest.mark.slow
def test_a_last_rank_with_less_of_a_tensor_is_traced_for_itself(tmp_path: Path) -> None:
    """72 ranks of which the last computes on less: two are traced to the end, and the 70 others are not."""
    text = TRAIN.format(extra="pass").replace("torch.ones(64", "torch.ones(64 if rank < size - 1 else 32")
    few, _ = ran(tmp_path, text, "equal", "dgx-h100:9")
    assert [rank.rank for rank in few.ranks] == [0, 71]
    assert any("rank 71 is traced for itself" in note for note in few.notes)
    assert few.training is not None
    assert [len(rank.like) for rank in few.training.ranks] == [71, 1]


def test_traced_once_is_as_long_as_traced_on_all(tmp_path: Path) -> None:
    """DDP on 16 GPUs takes the same virtual time and moves the same bytes, with two ranks traced and with all."""
    few, _ = ran(tmp_path, TRAIN.format(extra="pass"), "equal")
    every, _ = ran(tmp_path, TRAIN.format(extra="pass"), "all")
    assert len(few.ranks) == 1
    assert len(every.ranks) == 16
    assert few.virtual_time_s == pytest.approx(every.virtual_time_s, rel=1e-9)
    assert [(t.op, t.count, t.bytes) for t in few.collectives] == [(t.op, t.count, t.bytes) for t in every.collectives]
    assert any("ranks 0,15 of 16 were traced" in note for note in few.notes)


def test_stages_of_a_pipeline_are_kinds(tmp_path: Path) -> None:
    """Who sends to whom decides who is traced; the rank that logs is one of them, and its lines are shown once."""
    few, out = ran(tmp_path, STAGES, "equal", "dgx-h100:4")
    every, _ = ran(tmp_path, STAGES, "all", "dgx-h100:4")
    assert few.exit_code == every.exit_code == 0
    assert few.virtual_time_s == pytest.approx(every.virtual_time_s, rel=1e-9)
    assert len(few.ranks) < 16
    lines = [line.split("] ")[1] for line in out.splitlines()]
    assert sorted(set(lines)) == ["step 0", "step 1", "step 2"]


def test_where_only_the_last_rank_logs_its_whole_pipeline_is_traced_to_the_end(tmp_path: Path) -> None:
    """The last of eight pipelines stays with the rank that logs, and nothing begins anew for it a second time."""
    few, out = ran(tmp_path, STAGES.replace("stage == 3:", "rank == size - 1:"), "equal", "dgx-h100:4")
    assert few.exit_code == 0
    assert sorted(summary.rank for summary in few.ranks) == [0, 1, 2, 3, 28, 29, 30, 31]
    assert [line.split("] ")[1] for line in out.splitlines() if "step" in line] == ["step 0", "step 1", "step 2"]


@pytest.mark.parametrize(
    ("line", "left"), [("print('loss', step) if rank == 15 else None", 2), ("print('rank', rank, 'loss', step)", 1)]
)
def test_a_last_rank_that_logs_goes_on_where_the_first_says_other_things(tmp_path: Path, line: str, left: int) -> None:
    """Rank 0 names the model and the last one logs each step: all its lines come. Where both say the same, one does."""
    extra = f"print('a model') if step + rank == 0 else None; {line}; torch.cuda.synchronize()"
    outcome, out = ran(tmp_path, TRAIN.format(extra=extra), "equal")
    assert len(outcome.ranks) == left
    lines = [text for text in out.splitlines() if text.startswith("[15]") and "loss" in text]
    assert len(lines) == 4 if left == 2 else len(lines) < 4


def test_what_is_printed_after_a_long_first_step_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long step is enough to compare by, not to know who logs: the last rank's lines come, and without any it is
    given up in the second step, once it could have printed."""
    monkeypatch.setattr(equal_ranks, "LONG", 10)
    monkeypatch.setattr(equal_ranks, "WORDS", 20)
    line = "    torch.cuda.synchronize()\n    print('loss', step) if rank == {} else None\n"
    long = TRAIN.format(extra="[torch.ones(9, device='cuda') for _ in range(50)]")
    for who, left in ((15, 2), (0, 1)):
        text = long.replace("torch.cuda.synchronize()\n", "").rstrip("\n") + "\n" + line.format(who)
        outcome, out = ran(tmp_path, text, "equal")
        assert out.count("loss") == 4
        assert len(outcome.ranks) == left
    assert "after step 1 " in outcome.unseen


def test_a_pipeline_is_needed_by_its_rank_that_stays() -> None:
    """Of the groups of a rank those with members of kinds that nobody else of them stands for."""
    equal = EqualRanks([0, 0, 1, 1])
    assert equal.needed_by([(0, 2), (1, 3), (0, 1), (2, 3)], frozenset({0, 2, 3})) == {1, 3}
    assert equal.needed_by([(0, 2), (0, 1, 2, 3)], frozenset({0, 2})) == set()


def test_a_rank_that_does_otherwise_is_seen(tmp_path: Path) -> None:
    """An operator more on one of eight ranks, and each is traced for itself."""
    extra = "torch.ones(1000, device='cuda').add_(1) if rank == 3 else None"
    outcome, _ = ran(tmp_path, TRAIN.format(extra=extra), "equal", "dgx-h100:1")
    assert len(outcome.ranks) == 8
    assert outcome.unseen == ""


@pytest.mark.slow
def test_a_small_program_is_traced_on_all_of_a_few_ranks_in_all_its_steps(tmp_path: Path) -> None:
    """One of eight leaves out a later step: a hang, not a run that finished."""
    text = TRAIN.replace("    {extra}", "    if rank == 3 and step == 2:\n        continue")
    outcome, _ = ran(tmp_path, text, "equal", "dgx-h100:1")
    assert outcome.exit_code == 3
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.culprits == (3,)


def test_what_is_not_seen_is_said_with_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large program's ranks but the first are given up once they were compared: what they do later nobody knows."""
    monkeypatch.setattr(equal_ranks, "WORTH_IT", 0)
    monkeypatch.setattr(equal_ranks, "WORDS", 0)
    outcome, _ = ran(tmp_path, TRAIN.format(extra="pass"), "equal", "dgx-h100:1")
    assert outcome.unseen.startswith("what ranks 1-7 may do otherwise after step 1 ")
    assert any("ranks 0,7 of 8 were traced and compared for 1 step, then rank 0" in note for note in outcome.notes)
    shown = io.StringIO()
    print_summary(outcome, shown)
    assert "\nnot seen: what ranks 1-7 may do otherwise after step 1 (--ranks all " in shown.getvalue()


def test_ranks_of_nccl_are_known_as_equal_before_the_first_waits(tmp_path: Path) -> None:
    """A model made on the host, then the group (as Hugging Face's trainer does it): one rank of each kind makes it."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""\
            import os, torch, torch.distributed as dist
            with open("{tmp_path}/begun", "a") as begun:
                begun.write(os.environ["RANK"] + "\\n")
            dist.init_process_group("nccl")
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.all_reduce(torch.ones(3, device="cuda"))
            """)
    )
    outcome = run_program(RunRequest(program=str(script), on="dgx-h100:2", trace_equal_once=True))
    assert outcome.exit_code == 0
    assert (tmp_path / "begun").read_text().split() == ["0", "15"]


@pytest.mark.parametrize("late", ["", "dist.barrier(device_ids=[local])\n"], ids=["before its group", "after it"])
def test_of_a_few_ranks_that_compute_long_on_the_host_two_go_on(
    late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight models on one host would not fit into its memory: the first and the last make theirs."""
    monkeypatch.setattr(equal_ranks, "WORTH_HOST_S", 1e-3)
    model = (
        'weights = torch.ones(1 << 20)\nfor _ in range(20):\n    weights.normal_()\nprint("a model on rank", rank)\n'
    )
    if late:
        text = HEAD + model + late
    else:
        text = HEAD.splitlines(keepends=True)[0] + 'rank = int(os.environ["RANK"])\n' + model + HEAD
    script = tmp_path / "train.py"
    script.write_text(text + 'dist.all_reduce(torch.ones(3, device="cuda"))\n')
    with contextlib.redirect_stdout(io.StringIO()) as out:
        outcome = run_program(RunRequest(program=str(script), on="dgx-h100:1", trace_equal_once=True))
    assert outcome.exit_code == 0
    assert sorted(re.findall(r"a model on rank (\d+)", out.getvalue())) == ["0", "7"]
    assert any("ranks 0,7 of 8 were traced" in note for note in outcome.notes)


def test_calls_meet_when_some_of_their_ranks_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven of eight have arrived when the first, still at work, turns out to be enough: the time is that of all."""
    monkeypatch.setattr(equal_ranks, "WORTH_IT", 8 * 20)
    text = TRAIN.format(extra="[torch.ones(9, device='cuda') for _ in range(5)]; dist.barrier(device_ids=[local])")
    few, _ = ran(tmp_path, text, "equal", "dgx-h100:1")
    every, _ = ran(tmp_path, text, "all", "dgx-h100:1")
    assert [len(run.ranks) for run in (few, every)] == [1, 8]
    assert few.virtual_time_s == pytest.approx(every.virtual_time_s, rel=1e-9)


def test_of_a_few_ranks_that_send_to_each_other_each_stage_is_a_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pipelines of four on one node, once their program is not small: its stages are told apart."""
    monkeypatch.setattr(equal_ranks, "WORTH_IT", 8 * 6)
    few, _ = ran(tmp_path, STAGES, "equal", "dgx-h100:1")
    every, _ = ran(tmp_path, STAGES, "all", "dgx-h100:1")
    assert sorted(summary.rank for summary in few.ranks) == [0, 1, 2, 3]
    assert few.virtual_time_s == pytest.approx(every.virtual_time_s, rel=1e-9)


def test_a_mask_that_fills_is_alike_on_all_ranks(tmp_path: Path) -> None:
    """x[mask] = 0 is a fill, whose shape no rank's values decide: a vocabulary cut over ranks masks the rest."""
    extra = "mask = torch.arange(9, device='cuda') < rank; x = torch.ones(9, 3, device='cuda'); x[mask] = 0"
    outcome, _ = ran(tmp_path, TRAIN.format(extra=extra), "equal", "dgx-h100:1")
    assert not [note for note in outcome.notes if "did not do the same" in note]


def test_values_of_their_own_are_summed_right(tmp_path: Path) -> None:
    """What ranks bring to a collective is theirs: the sum of their numbers is not one number many times."""
    text = """\
    x = torch.tensor([float(rank)], device="cuda")
    dist.all_reduce(x)
    if rank == 0:
        print("sum", x.item())
    """
    outcome, out = ran(tmp_path, text, "equal")
    assert "sum 120.0" in out
    assert out.count("sum") == 1
    assert any("ranks bring values of their own to all_reduce" in note for note in outcome.notes)


@pytest.mark.slow
def test_a_hang_is_named_by_all_ranks(tmp_path: Path) -> None:
    """A rank that leaves out a call is the culprit, as if every rank had been traced from the start."""
    text = """\
    x = torch.ones(1000, device="cuda")
    if rank != 15:
        dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.barrier()
    """
    outcome, _ = ran(tmp_path, text, "equal")
    assert outcome.exit_code in (3, 4)
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.culprits == (15,)


def test_values_on_the_host_are_their_own_too(tmp_path: Path) -> None:
    """A program on GPUs that sums a number of each rank over gloo gets the sum of all."""
    text = """\
    on_host = dist.new_group(backend="gloo")
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=on_host)
    if rank == 0:
        print("sum", x.item())
    """
    _, out = ran(tmp_path, text, "equal")
    assert "sum 120.0" in out


@pytest.mark.slow
def test_what_the_first_rank_does_alone_is_not_everybodys(tmp_path: Path) -> None:
    """Rank 0 of 72 computes more between its calls: a third says who is the odd one, and rank 0 stands for itself."""
    extra = "x = torch.ones(2048, 2048, device='cuda'); [x @ x for _ in range(4 - 4 * (rank > 0))]"
    outcome, _ = ran(tmp_path, TRAIN.format(extra=extra), "equal", "dgx-h100:9")
    assert outcome.training is not None
    assert [rank.like for rank in outcome.training.ranks] == [(0,), tuple(range(1, 72))]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "traced", "anew"), [("fsdp2", [0, 71], 0), ("by_hand", [0, 1, 36, 71], 2)])
def test_a_parameter_of_fewer_rows_than_ranks_is_traced_in_few_runs(
    tmp_path: Path, how: str, traced: list[int], anew: int
) -> None:
    """16 of 72 ranks have a row: nothing begins anew where FSDP2 cuts, twice where the program does, and not once for
    each rank with a row."""
    text = TRAIN.format(extra="pass")
    if how == "fsdp2":
        text = text.replace(
            "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).cuda())",
            "from torch.distributed.fsdp import fully_shard\n"
            "model = fully_shard(torch.nn.Linear(512, 16, device='cuda'))",
        )
    else:
        text = text.replace("torch.ones(64", "torch.ones(64 if rank < 16 else 32")
    outcome, out = ran(tmp_path, text, "equal", "dgx-h100:9")
    assert outcome.exit_code == 0
    assert [rank.rank for rank in outcome.ranks] == traced
    assert out.count("begins anew") == anew


def test_what_a_rank_scatters_or_gathers_is_its_own(tmp_path: Path) -> None:
    """Who stands for others gets its own part, over NCCL and gloo, also of a root that nobody would have traced."""
    text = """\
    on_host = dist.new_group(backend="gloo")
    for device, group in (("cuda", None), ("cpu", on_host)):
        got = torch.zeros(2, device=device)
        parts = [torch.full((2,), 7.0, device=device) for place in range(size)]
        parts[0] += 1
        dist.scatter(got, parts if rank == 5 else None, src=5, group=group)
        whole = torch.zeros(size * 2, device=device)
        dist.all_gather_single(whole, got, group=group)
        parts = [torch.zeros(2, device=device) for _ in range(size)] if rank == 3 else None
        dist.gather(got, parts, dst=3, group=group)
        if rank == 0:
            print(device, got.tolist(), whole.sum().item())
    """
    outcome, out = ran(tmp_path, text, "equal")
    assert outcome.exit_code == 0
    assert "cuda [8.0, 8.0] 226.0" in out
    assert "cpu [8.0, 8.0] 226.0" in out


def test_a_gather_of_many_costs_what_one_does(tmp_path: Path) -> None:
    """Each of 1,024 ranks hears a number from each; two are traced, and nothing is computed for the others."""
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
        _, out = ran(tmp_path, text, "equal", "dgx-h100:128")
    assert "sum 1024" in out
    assert len(copied) <= 3 * 1024
