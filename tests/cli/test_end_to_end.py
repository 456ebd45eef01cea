"""`distsim run` with the real simulator behind it: output, files, exit codes, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distsim.cli import main
from tests.documents import checked

pytestmark = pytest.mark.smoke

HEALTHY = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print("sum", x[0].item())
"""
SKIPPED = HEALTHY + "if dist.get_rank() != 1:\n    dist.all_reduce(x)\n"
REORDERED = HEALTHY + "(dist.barrier if dist.get_rank() else lambda: dist.broadcast(x, 0))()\n"
RAISING = HEALTHY + "raise ValueError('a bad batch')\n"
ADDRESS = HEALTHY + "raise ValueError(f'at {object()}')\n"
FLAGS = ["run", "--on", "dgx-h100:1", "--nproc-per-node", "2"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("program", "code", "kinds"),
    [
        (HEALTHY, 0, []),
        (RAISING, 1, ["rank_raised"]),
        (SKIPPED, 3, ["missing_rank"]),
        (REORDERED, 4, ["op_mismatch"]),
    ],
    ids=["healthy", "raising", "skipped", "reordered"],
)
def test_the_exit_code_and_the_report_tell_the_same(program: str, code: int, kinds: list[str], folder: Path) -> None:
    """What the shell sees and what a program reads agree."""
    (folder / "train.py").write_text(program)
    assert main([*FLAGS, "--report", "r.json", "train.py"]) == code
    report = checked((folder / "r.json").read_text())
    assert report["exit_code"] == code
    assert [diagnosis["kind"] for diagnosis in report["diagnoses"]] == kinds
    assert [total["op"] for total in report["collectives"]][:1] == ["all_reduce"]


@pytest.mark.parametrize(
    "program", [HEALTHY, SKIPPED, RAISING, ADDRESS], ids=["healthy", "skipped", "raising", "address"]
)
def test_the_same_seed_gives_the_same_bytes(program: str, folder: Path) -> None:
    """Report and trace of two runs are equal, hung and raising ones too."""
    (folder / "train.py").write_text(program)
    for name in ("a", "b"):
        main([*FLAGS, "--report", f"{name}.json", "--trace", f"{name}.trace.json", "train.py"])
    assert (folder / "a.json").read_bytes() == (folder / "b.json").read_bytes()
    first, second = ((folder / f"{name}.trace.json").read_text() for name in ("a", "b"))
    assert first.replace("a.trace", "b.trace") == second


def test_what_the_ranks_print_comes_first_then_the_summary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line behind its rank; then the verdict and the tables."""
    (folder / "train.py").write_text(HEALTHY)
    main([*FLAGS, "train.py"])
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:2]) == ["[0] sum 3.0", "[1] sum 3.0"]
    assert lines[2] == "train.py on dgx-h100:1: 2 ranks, backend gloo, seed 0"
    assert lines[3].startswith("finished after ")


def test_a_link_is_named_in_the_trace_by_its_name_in_the_report(folder: Path) -> None:
    """Counters and the table of links speak of the same links."""
    (folder / "train.py").write_text(HEALTHY)
    main([*FLAGS, "--report", "r.json", "--trace", "t.json", "train.py"])
    names = {link["name"] for link in json.loads((folder / "r.json").read_text())["links"]}
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters
    assert counters <= names


def test_log_dir_has_a_file_a_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --log-dir the ranks are silent on the terminal and each has its own file."""
    (folder / "train.py").write_text(HEALTHY)
    assert main([*FLAGS, "--log-dir", "logs", "train.py"]) == 0
    assert "sum 3.0" not in capsys.readouterr().out
    logs = sorted(path for path in (folder / "logs").rglob("*stdout*") if path.is_file())
    assert [path.read_text() for path in logs] == ["sum 3.0\n"] * 2
