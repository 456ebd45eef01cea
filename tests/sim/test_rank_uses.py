"""Lines of a program that use a rank's number, and what they are good for in a sample of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.sim import Outcome, RunRequest, run_program
from distsim.sim.world.equal_ranks import RankUse, rank_uses

RANKS = 16
PLACES = [
    {"RANK": r, "LOCAL_RANK": r % 8, "GROUP_RANK": r // 8, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": 8}
    for r in range(RANKS)
]
HEAD = """\
import os, torch, torch.distributed as dist
rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
"""


def uses(folder: Path, *texts: str) -> list[RankUse]:
    """Of a program of several files; the first has HEAD."""
    files = []
    for number, text in enumerate(texts):
        file = folder / f"file{number}.py"
        file.write_text(text if number else HEAD + text)
        files.append(str(file))
    return rank_uses(files, PLACES)


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("if step == 2 and rank == 9: raise OSError", [9]),
        ("if not rank % 2: pass", [1, 3, 5, 7, 9, 11, 13, 15]),
        ("if int(os.getenv('RANK', 0)) // 8 == 1: pass", list(range(8, 16))),
        ("x = torch.ones(8 + (rank % 5 == 4))", [4, 9, 14]),
        ("last = rank == dist.get_world_size() - 1", [15]),
        ("bad = 3\nif rank in (bad, 5): pass", [3, 5]),
        ("leader = local\nwhile leader == 0: break", [0, 8]),
        ("def is_odd_one(r=0): return r == 7\nis_odd_one(rank)\nme = rank\nassert me != 7", [7]),
    ],
)
def test_a_test_is_evaluated_for_every_rank(line: str, ranks: list[int], tmp_path: Path) -> None:
    """Whatever else the condition depends on: its part on ranks alone tells them apart."""
    known = [use for use in uses(tmp_path, line) if use.outcomes is not None]
    assert known
    for use in known:
        split = {tuple(r for r in range(RANKS) if use.outcomes[r] is side) for side in (True, False)}
        assert tuple(ranks) in split, use
        assert use.tells_apart(frozenset(range(RANKS)) - set(ranks))
        assert not use.tells_apart(frozenset(range(RANKS)))


@pytest.mark.parametrize(
    ("line", "how"),
    [
        ("x = torch.ones(8 + rank % 2)", "an argument of ones"),
        ("experts = [[1], [2]]\nmine = experts[rank]", "an index"),
        ("path = f'shard_{rank}.bin'", "text"),
        ("path = 'shard_%d.bin' % rank", "text"),
        ("for i in range(rank): pass", "an argument of range"),
        ("if rank == bad(): pass", "a test"),
        ("for bad in (1, 2):\n    if rank == bad: pass", "a test"),
        ("me = mesh.get_local_rank('tp')\nif me: pass", "a test"),
        ("n = min(rank, 3)", "a test"),
    ],
)
def test_what_cannot_be_evaluated_is_named(line: str, how: str, tmp_path: Path) -> None:
    """An index, a text, an argument, or a test of what is not known."""
    (use,) = uses(tmp_path, line)
    assert (use.how, use.outcomes) == (how, None)
    assert use.where == f"{tmp_path}/file0.py:{3 + line.count(chr(10))}"


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.set_device(local)",
        "print(f'rank {rank}')",
        "model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[local])",
        "torch.manual_seed(1 + rank)",
        "device = f'cuda:{local}'",
        "if rank >= dist.get_world_size(): raise ValueError(f'{rank} is too large')",
        "def size(rank): return sizes[rank]\nsize(3)",
        "if len(sys.argv) > 1: pass",
    ],
)
def test_what_every_job_does_with_a_rank_is_not_worth_a_line(line: str, tmp_path: Path) -> None:
    """Its device, its seed, its name in a line that it prints; a test that says the same of all."""
    assert uses(tmp_path, line) == []


def test_a_rank_is_followed_into_other_files(tmp_path: Path) -> None:
    """Through arguments, attributes and results of the program's own functions."""
    init, step = "def __init__(self, number): self.number = number", "def step(self): return table[self.number]"
    other = f"class Log:\n    {init}\n    {step}\n"
    assert [use.how for use in uses(tmp_path, "log = Log(number=rank)\n", other)] == ["an index"]


def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    """No such file, no Python: nothing is known about it."""
    (tmp_path / "bad.py").write_text("if rank ==")
    assert rank_uses([str(tmp_path / "bad.py"), str(tmp_path / "none.py")], PLACES) == []


PROGRAM = """\
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
for step in range(3):
    dist.all_reduce(torch.ones(8, device="cuda"))
    {line}
torch.cuda.synchronize()
"""


def sampled(folder: Path, line: str) -> Outcome:
    """The program with *line*, a sample of its ranks traced."""
    (folder / "train.py").write_text(PROGRAM.format(line=line))
    return run_program(RunRequest(program=str(folder / "train.py"), on="dgx-h100:2", budget_s=0.0))


def test_a_rank_that_a_test_names_is_in_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank amid the others raises: it is traced and named, though the sample alone would not have it."""
    monkeypatch.chdir(tmp_path)
    outcome = sampled(tmp_path, "if step == 2 and rank == 11: raise OSError('disk full')")
    assert outcome.diagnosis is not None
    assert (outcome.exit_code, outcome.diagnosis.culprits) == (1, (11,))
    assert "were never run" in outcome.unseen
    assert "could differ" not in outcome.unseen


def test_the_line_that_leaves_others_unproven_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ranks bring another shape is not seen by reading: the line says where to look."""
    monkeypatch.chdir(tmp_path)
    outcome = sampled(tmp_path, "dist.all_reduce(torch.ones(8 + rank // 6 % 2 * 0, device='cuda'))")
    assert outcome.exit_code == 5
    assert "; train.py:7 uses the rank in a way that could differ (torch.ones(8 + rank // 6 % 2 * 0" in outcome.unseen
