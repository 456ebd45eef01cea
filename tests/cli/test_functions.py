"""The commands as functions of Python: the same words, the same report, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

import distsim
from distsim.errors import UsageError
from tests.documents import checked

HANGS = """\
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
print("arguments", sys.argv[1:])
if dist.get_rank():
    dist.all_reduce(torch.ones(4))
"""
TRAINS = """\
import argparse, os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
parser = argparse.ArgumentParser()
parser.add_argument("--mbs", type=int, default=2)
mbs = parser.parse_args().mbs
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = DDP(torch.nn.Linear(256, 256, device="cuda"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(mbs, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts in an empty folder, and no kept points of other tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("hangs.py").write_text(HANGS)
    Path("trains.py").write_text(TRAINS)


def test_a_run_answers_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """The text is in the answer, and nothing of it is printed."""
    answer = distsim.run("hangs.py", "--its", 3, on="dgx-h100:1", nproc_per_node=3)
    assert (answer.command, answer.exit_code) == ("run", 3)
    assert checked(answer.report)["diagnoses"][0]["culprits"] == [0]
    assert str(answer) == answer.text
    assert "arguments ['--its', '3']" in answer.text
    assert "HANG  missing rank  rank 0" in answer.text
    assert answer._repr_html_().startswith("<pre>")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "wrote" not in printed.err


@pytest.mark.slow
def test_a_search_takes_flags_and_lists() -> None:
    """`vary` is given as often as it has items."""
    answer = distsim.tune("trains.py", on="dgx-h100:1", nproc_per_node=2, vary=["--mbs=2,4"], n=1)
    assert answer.exit_code == 0
    assert {point["settings"]["--mbs"] for point in checked(answer.report)["points"]} == {2, 4}
    assert "best" in answer.text


@pytest.mark.slow
def test_a_command_without_text_shows_its_figures() -> None:
    """`fits` and `bench` print their report in place of it."""
    answer = distsim.fits("trains.py", on="dgx-h100:1", nproc_per_node=2)
    assert checked(answer.report)["fits"]
    assert "fits: True" in str(answer)
    assert "<tr><td>fits</td><td>True</td></tr>" in answer._repr_html_()
    assert distsim.bench("all_reduce", on="dgx-h100:1", sizes="1M").report["ranks"] == 8


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: distsim.run("hangs.py", nods=2), "distsim run does not know --nods=2; did you mean --nnodes"),
        (lambda: distsim.run("none.py"), "no script none.py"),
        (lambda: distsim.run("hangs.py", report="r.json"), "distsim.run: expected no report, which is in the result"),
        (lambda: distsim.diagnose("none"), "expected a folder of flight records, got none: no such folder"),
        (lambda: distsim.attach(1 << 30), "1073741824"),
    ],
    ids=["flag", "script", "report", "folder", "process"],
)
def test_a_mistake_is_the_command_lines_error(call: object, expected: str) -> None:
    """As an exception with the same line."""
    assert callable(call)
    with pytest.raises(UsageError, match=expected):
        call()
