"""Rows of the yardstick that run a published program out of its checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.fitting.comparisons import read_pairs, tokens_of
from tools.fitting.frameworks import FRAMEWORKS, Framework
from tools.fitting.rows import Row, read_rows
from tools.fitting.training_steps import simulate, summarise

TRAIN = """
import argparse, os, torch
parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
args = parser.parse_args()
assert os.environ["A_VARIABLE"] == "1" and open("data.txt").read() == "made"
model = torch.nn.Linear(512, 512, device="cuda")
optimizer = torch.optim.SGD(model.parameters())
for _ in range(args.train_iters):
    model(torch.ones(64, 512, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Row:
    """A row of a framework whose clone is there."""
    clone = tmp_path / "here" / "owner" / "name"
    clone.mkdir(parents=True)
    (clone / "train.py").write_text(TRAIN)
    git = ("git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setenv("DISTSIM_REPOSITORIES", str(tmp_path / "here"))
    made = Framework(
        "owner/name",
        "HEAD",
        ["train.py"],
        "--train-iters",
        "any",
        prepare="open('data.txt', 'w').write('made')",
        environ={"A_VARIABLE": "1"},
    )
    monkeypatch.setitem(FRAMEWORKS, "ours", made)
    return Row("node", "a row", "dgx-h100:1", 1, "ours:train.py", (), 0.001, None, "http://a")


def test_a_framework_runs_unmodified_at_its_commit(row: Row) -> None:
    """Its data is made, its variables are set, its own flag says how many steps."""
    came = simulate(row)
    assert not came.failure
    assert came.step_s


@pytest.mark.parametrize(
    ("variable", "commit", "said"),
    [("elsewhere", "HEAD", "git clone https://github.com/owner/name elsewhere"), (None, "abcdef123456", "abcdef123")],
)
def test_what_is_not_here_is_left_out(
    row: Row, monkeypatch: pytest.MonkeyPatch, variable: str | None, commit: str, said: str
) -> None:
    """With the command that brings it; it breaks no bound."""
    if variable:
        monkeypatch.setenv("DISTSIM_REPOSITORIES", variable)
    monkeypatch.setitem(FRAMEWORKS, "ours", Framework("owner/name", commit, ["train.py"], "--train-iters", "any"))
    came = simulate(row)
    assert said in came.lacking
    assert not summarise([came]).broken


def test_a_package_that_is_missing_is_named(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the release that is needed."""
    needs = ["torch", "a-package==1.2"]
    monkeypatch.setitem(FRAMEWORKS, "ours", Framework("owner/name", "HEAD", ["train.py"], "-n", "any", needs=needs))
    assert simulate(row).lacking == "pip install -c constraints.txt a-package==1.2"


def test_every_framework_of_a_row_is_known() -> None:
    """And each that is known has a row."""
    named = {each.program.partition(":")[0] for each in read_rows() if ":" in each.program}
    assert named == set(FRAMEWORKS)


def test_rows_that_are_compared_have_tokens_whatever_their_program_calls_them() -> None:
    """Of a GPU and a step: by the flags of scenarios/training, and by Megatron-LM's own."""
    rows = {row.name: row for pair in read_pairs() for row in pair}
    assert all(tokens_of(row) > 0 for row in rows.values())
    assert tokens_of(rows["Llama 70B 12 layers TP 2"]) == 32 * 4096 / 8
    assert tokens_of(rows["Llama 8B ZeRO-1 TP 2 DP 4"]) == 64 * 4096 / 2
