"""`distsim equal` as its user sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.cli import main
from tests.documents import checked

PROGRAM = """\
import sys, torch, torch.distributed as dist, torch.nn as nn
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient
class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x
    @staticmethod
    def backward(ctx, gradient): return gradient
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        one, two = torch.randn(32, 16), torch.randn(16, 32)
        if "drawn" in sys.argv and rank: one, two = torch.randn(32, 16), torch.randn(16, 32)
        self.one = nn.Parameter(one.chunk(size, 0)[rank].clone())
        self.two = nn.Parameter(two.chunk(size, 1)[rank].clone())
    def forward(self, x):
        y = torch.tanh(Enter.apply(x) @ self.one.t()) @ self.two.t()
        return x + (y if "fault" in sys.argv else Leave.apply(y))
torch.manual_seed(0)
model = nn.Sequential(Block(), nn.Dropout(0.1), Block())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(9):
    model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).pow(2).mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""
LINE = PROGRAM[: PROGRAM.index("    model(")].count("\n") + 1
"""That calls the model."""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return str(path)


def _equal(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["equal", "--on", "dgx-h100:1", "--nproc-per-node", "2", "--steps", "2", *arguments])
    return code, " ".join(capfd.readouterr().out.split())


@pytest.mark.slow
def test_a_product_that_nobody_reduces(program: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The block is named, with what to do; exit code 5, and JSON."""
    code, said = _equal(capfd, "--report", str(tmp_path / "report.json"), program, "fault")
    assert code == 5
    assert said.startswith("DIFFERS output of 0 (Block) ranks 0,1 at step 1")
    assert "the parts were not added up" in said
    assert f"train.py:{LINE}" in said
    assert "next: all_reduce what 0 (Block) computes over ranks 0,1" in said
    report = checked((tmp_path / "report.json").read_text())
    assert (report["schema"], report["equal"], report["first"]["name"]) == ("distsim.equal/1", False, "0")


@pytest.mark.soak
@pytest.mark.parametrize("drawn", [[], ["drawn"]])
def test_a_right_layout_is_equal(drawn: list[str], program: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Also where the second layout draws other weights: it is given the first one's."""
    code, said = _equal(capfd, program, *drawn)
    assert (code, said[:14]) == (0, "EQUAL 2 steps ")
    assert ("started with the first one's values of 0.one, 0.two" in said) is bool(drawn)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("raise SystemExit(3)", "the first layout does not run"),
        ("print('no model')", "no rank of the first layout called a model that has parameters"),
        ("import torch; torch.nn.Linear(2, 2)(torch.ones(2))", "no optimizer of the first layout made a step"),
    ],
)
def test_programs_that_cannot_be_compared(
    text: str, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line that says which layout, and why."""
    path = tmp_path / "train.py"
    path.write_text(text)
    assert main(["equal", "--nproc-per-node", "2", str(path)]) == 2
    assert line in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["gone.py"], "no script gone.py"),
        (["--steps", "0", __file__], "--steps: expected 1 or more, got 0"),
        (["--and-nproc-per-node", "0", __file__], "--and-nproc-per-node: expected 1 or more, got 0"),
        (["--and-args", "--seq", __file__], "a value that begins with a dash is written --and-args=VALUE"),
        (["--and-args", "'", __file__], "--and-args: expected arguments as a shell takes them"),
        (["--map", "a", __file__], "--map: expected [RANKS:]NAME=NAME, as 1:layers.0=layers.4, got 'a'"),
        (["--map", "x:a=b", __file__], "--map: expected [RANKS:]NAME=NAME"),
    ],
)
def test_bad_input(arguments: list[str], line: str, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2."""
    assert main(["equal", *arguments]) == 2
    assert line in capfd.readouterr().err
