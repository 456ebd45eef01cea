"""Goodput of weeks with failures: what the simulated jobs agree with, and what a user is told."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from distsim.cli import main
from distsim.errors import UsageError
from distsim.report.training.goodput import (
    WEEK_S,
    FailurePlan,
    best_interval,
    daly_interval,
    expected_good,
    goodput,
    goodput_text,
)
from tests.documents import checked

HOUR_S = 3600.0
PROGRAM = """\
import torch, torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.Linear(512, 512, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(8, 512, device="cuda")).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
"""


def plan(mtbf_h: float, every_s: float | None, write_s: float, detect_s: float = 600.0) -> FailurePlan:
    """A plan whose node fails once in *mtbf_h* hours."""
    return FailurePlan(mtbf_h * HOUR_S, (), every_s, write_s, detect_s, 300.0)


@pytest.mark.parametrize(
    ("mtbf_h", "nodes", "every_s", "write_s", "weeks"),
    [(5000.0, 128, 1800.0, 45.0, 4), (6335.0, 2048, 600.0, 20.0, 1), (500.0, 64, 3600.0, 120.0, 4)],
    ids=["1,024 GPUs", "16,384 GPUs", "sick nodes"],
)
def test_simulated_jobs_agree_with_dalys_formula(
    mtbf_h: float, nodes: int, every_s: float, write_s: float, weeks: int
) -> None:
    """Within two percent, and the shares are all of the time."""
    result = goodput(plan(mtbf_h, every_s, write_s), weeks * WEEK_S, nodes, 0.0)
    assert result.good == pytest.approx(expected_good(mtbf_h * HOUR_S / nodes, every_s, write_s, 900.0), rel=0.02)
    assert result.good + result.saving + result.lost + result.down == pytest.approx(1.0)
    assert result.low <= result.good <= result.high
    assert result.failures == pytest.approx(weeks * WEEK_S / result.good / (mtbf_h * HOUR_S / nodes), rel=0.1)


def test_without_failures_only_checkpoints_cost_time() -> None:
    """The last period ends with the job, and writes none."""
    result = goodput(plan(1e9, 0.1 * WEEK_S, 0.01 * WEEK_S), WEEK_S, 1, 0.0)
    assert result.good == pytest.approx(1.0 / 1.09)
    assert (result.lost, result.down) == (0.0, 0.0)


@pytest.mark.parametrize("write_s", [1.0, 60.0, 900.0])
def test_the_best_interval_is_better_than_its_neighbours(write_s: float) -> None:
    """And than those of Young and Daly, which are near it where a checkpoint is short."""
    mtbf_s = 4 * HOUR_S
    best_s = best_interval(mtbf_s, write_s)
    others_s = [0.9 * best_s, 1.1 * best_s, math.sqrt(2 * write_s * mtbf_s), daly_interval(mtbf_s, write_s)]
    best = expected_good(mtbf_s, best_s, write_s, 900.0)
    assert all(expected_good(mtbf_s, other_s, write_s, 900.0) <= best + 1e-12 for other_s in others_s)
    assert daly_interval(mtbf_s, write_s) == pytest.approx(best_s, rel=0.02)


def test_measured_times_are_drawn_from() -> None:
    """A job that fails every ten hours, never sooner, loses at most a period each time."""
    between_s = (10 * HOUR_S,)
    result = goodput(FailurePlan(None, between_s, HOUR_S, 60.0, 60.0, 60.0), 100 * HOUR_S, 128, 0.0)
    assert (result.job_mtbf_s, result.low, result.high) == (10 * HOUR_S, result.good, result.good)
    assert result.failures == 10 or result.failures == 11
    assert result.lost < 0.1


def test_a_job_without_progress_is_refused() -> None:
    """Its first checkpoint is later than the next failure."""
    hopeless = FailurePlan(None, (600.0,), HOUR_S, 60.0, 60.0, 60.0)
    with pytest.raises(UsageError, match="the job makes no progress"):
        goodput(hopeless, WEEK_S, 1, 0.0)


def test_the_report_names_shares_and_the_best_interval() -> None:
    """Beside those of Young and Daly."""
    text = goodput_text(goodput(plan(5000.0, 1800.0, 45.0), WEEK_S, 128, 0.0))
    head, interval = text.splitlines()
    assert "days of steps take" in head
    assert "one in 39.1 h" in head
    assert interval.startswith("with a checkpoint every 30 min; best 58.")
    assert "Young 59.3 min, Daly 58." in interval


def test_an_interval_shorter_than_a_checkpoint_is_named() -> None:
    """It is why hardly any time is left for new steps; an interval of the same length is not."""
    short = goodput(plan(5000.0, 5.0, 300.0), HOUR_S, 8, 0.0)
    assert short.good < 0.02
    assert goodput_text(short).splitlines()[1] == (
        "a checkpoint takes 5 min, longer than the 5 s of steps between two: writing them leaves little time for steps"
    )
    assert len(goodput_text(goodput(plan(5000.0, 300.0, 300.0), HOUR_S, 8, 0.0)).splitlines()) == 2


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--mtbf", "5x"], "--mtbf: expected a duration such as 5000h, got '5x'"),
        (
            ["--checkpoint-every", "5m"],
            "says what failures cost: expected --mtbf TIME or --failures",
        ),
        (["--mtbf", "5h", "--failures", "f"], "expected --mtbf or --failures, got both"),
        (["--failures", "none"], "--failures none: expected a file with hours in each line"),
        (["--failures", "empty"], "--failures empty: expected hours between failures, a number in each line, got none"),
        (["--failures", "words"], "--failures words:2: expected hours between two failures, got 'soon'"),
        (["--mtbf", "5h", "--on", "gloo"], "goodput is simulated, and --on gloo runs for real"),
    ],
)
def test_a_wrong_flag_is_one_line(
    flags: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything runs."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    Path("empty").write_text("# none\n")
    Path("words").write_text("12\nsoon\n")
    assert main(["run", *flags, "train.py"]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("takes", [[], ["--checkpoint-takes", "30s"]], ids=["no checkpoint", "given"])
def test_a_run_reports_it(
    takes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the script writes no checkpoint, its time has to be given."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    words = ["run", "--on", "dgx-h100:2", "--nproc-per-node", "1", "--mtbf", "5000h", *takes, "--report", "r.json"]
    assert main([*words, "train.py"]) == 0
    found = checked(Path("r.json").read_text())["training"]["goodput"]
    printed = capsys.readouterr().out
    assert (found is None) == (not takes) == ("no goodput: the script wrote no checkpoint" in printed)
    assert found is None or found["job_mtbf_s"] == 2500 * HOUR_S
