"""`distsim sweep` of a script: its own flags and clusters vary, training steps are columns, what fails says why."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.cli.dispatch import main
from distsim.planning.command import rewritten
from distsim.planning.tables import as_good, print_points
from distsim.planning.variations import Point
from distsim.report.tables import figure_name, figure_text, figure_unit
from distsim.scenario.expect.result import Result

TRAIN = """\
import argparse, sys
import torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--layers", type=int, default=1)
args = parser.parse_args()
if args.width % 2:
    sys.exit("width must be even")
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = torch.nn.Sequential(*(torch.nn.Linear(args.width, args.width, device="cuda") for _ in range(args.layers)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(64, args.width, device="cuda")).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            ["sweep", "--vary", "--tp=1,2", "train.py", "--vary", "x"],
            ["sweep", "--vary=--tp=1,2", "train.py", "--script-arguments=--vary x"],
        ),
        (["sweep", "x.toml", "--vary", "seed=1,2"], ["sweep", "x.toml", "--vary", "seed=1,2"]),
        (["sweep", "--vary", "--csv"], ["sweep", "--vary", "--csv"]),
    ],
)
def test_words_are_the_scripts_or_ours(given: list[str], expected: list[str]) -> None:
    """A flag of the script that varies is one word with --vary; what follows the script is the script's."""
    assert rewritten(given) == expected


@pytest.mark.slow
def test_flags_and_clusters_of_a_script_vary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best point stands first; a program that refuses its flags, and one that does not fit, say so in a line."""
    monkeypatch.setenv("COLUMNS", "160")  # pytest's workers have 80, in which there would be two tables
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    table = tmp_path / "points.csv"
    command = ["sweep", "--on", "dgx-h100:1,dgx-a100:1", "--nproc-per-node", "2", "-n", "1", "--csv", str(table)]
    vary = ["--vary", "--width=512,513,200000"]
    assert main([*command, *vary, str(script), "--layers", "2", "--width", "64"]) == 0
    printed = capsys.readouterr().out
    assert "best: most steps/s per GPU\n" in printed
    lines = [line.split() for line in printed.splitlines()]
    assert [line[:5] for line in lines if "best" in line] == [["dgx-h100:1", "512", "best", "2", "yes"]]
    assert sum("NO" in line for line in lines) == 2
    told = [" ".join(line) for line in lines]
    assert "on=dgx-h100:1 --width=513: exit code 1: width must be even" in " ".join(told)
    assert " ".join(told).count(" were missing at that point") == 2
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["fits"] for row in rows if row["--width"] != "513"] == ["1.0", "0.0"] * 2
    assert float(rows[0]["step_s"]) > 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere.py", "--tp", "2"], "nothing to vary: expected --vary PATH=A,B, or several clusters after --on"),
        (["--vary", "--tp=1", "--on", "nope:1", "x.py"], "error: --on: unknown cluster 'nope'"),
        (["--vary", "tp=1,2", "x.py"], "--vary tp=1,2: expected a flag of the script; did you mean --vary --tp=1,2?"),
        (["--vary", "--tp=1", "nowhere.py"], "no script nowhere.py: no such file"),
        (["--on", "dgx-h100:1", "--vary", "seed=1,2", "x.toml"], "--on: a scenario file contains it"),
        (["--price", "-1", "--vary", "seed=1,2", "x.toml"], "--price: expected an amount of money"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what was expected and what came."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text('program = "x.py"\n')
    (tmp_path / "x.py").write_text("")
    if arguments[0] == "nowhere.py":
        (tmp_path / "nowhere.py").write_text("")
    assert main(["sweep", *arguments]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said


@pytest.mark.parametrize(
    ("name", "value", "text", "people_say"),
    [
        ("tokens_per_s", 1234567.0, "1.23457e+06", "tokens per s"),
        ("mfu", 0.403, "40.3%", "mfu"),
        ("step_s", 0.377, "377 ms", "step"),
        ("peak_gpu_memory_bytes", float(1 << 30), "1 GiB", "peak gpu memory"),
    ],
)
def test_a_figure_has_its_unit(name: str, value: float, text: str, people_say: str) -> None:
    """Tokens per second are no seconds, shares are per cent."""
    assert (figure_text(name, value), figure_name(name)) == (text, people_say)
    assert figure_unit("tokens_per_s", 10.0) == (1.0, "number")


def test_layouts_within_each_others_errors_are_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points of one kind of node by the error of a ratio; others by what both steps may err. Without an interval
    nothing is said."""

    def point(on: str, step_s: float, spread: float | None) -> Any:
        figures = {"step_s": step_s, "fits": 1.0, "gpus": 8.0}
        if spread is not None:
            figures |= {"step_low_s": step_s * (1 - spread), "step_high_s": step_s * (1 + spread)}
        result = SimpleNamespace(figures=figures, exit_code=0, passed=True, failures=[], error=None, text="")
        return SimpleNamespace(settings={"on": on}, result=result)

    monkeypatch.setattr("distsim.planning.tables.ratio_error", lambda: 1.1)
    steps_s = [1.0, 1.08, 1.12, 1.3]
    assert as_good([point("dgx-h100:1", step_s, 0.5) for step_s in steps_s]) == 1
    kinds = [point(on, step_s, 0.1) for on, step_s in zip(("a:1", "b:1", "c:1", "d:1"), steps_s, strict=True)]
    assert as_good(kinds) == 2
    assert as_good([point("a:1", step_s, None) for step_s in steps_s]) == 0
    assert as_good([point("a:1", 1.0, 0.1), point("b:1", 1.3, 0.01)]) == 0


def test_an_exception_of_the_script_is_shown_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below the lines of the points, which have its first line: the culprit's, whatever its name. Each is there once
    with its points and ranks; numbers alone do not make another one. A full GPU has no traceback."""
    monkeypatch.setenv("COLUMNS", "80")

    def point(tp: int, **figures: float) -> Point:
        texts = {"Cut": f"no parts of\n{tp} heads" + " and more" * 9, "OSError": "peer is gone"}
        traced = {kind: f"Traceback (most recent call last):\n{kind}: {text}" for kind, text in texts.items()}
        failures = [
            {"ranks": ranks, "type": kind, "message": texts[kind], "traceback": traced[kind]}
            for ranks, kind in (([0], "OSError"), ([1, 2], "Cut"))
        ]
        result = Result("t", "t.py", exit_code=1, kind="rank_raised", culprits=(1, 2), document={"failures": failures})
        return Point({"--tp": tp}, replace(result, figures=figures))

    print_points([point(1), point(2), point(4, fits=0.0, missing_gpu_memory_bytes=1e9)])
    printed = capsys.readouterr().out
    _, lines, *texts = printed.split("\n\n")
    assert "--tp=1: rank_raised: Cut: no parts of (traceback below)\n" in lines
    assert "out of memory" in lines
    assert "(traceback below)" not in lines[lines.index("--tp=4") :].splitlines()[0]
    first = f"Traceback (most recent call last):\nCut: no parts of\n1 heads{' and more' * 9}"
    assert texts[0] == f"--tp=1; --tp=2, the same but for numbers; of --tp=1, ranks 1,2:\n{first}"
    assert texts[1].startswith("rank 0:\nTraceback (most recent call last):\nOSError: peer is gone\n")
    assert len(texts) == 2


def test_points_on_several_clusters_fit_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In two tables; the cheapest point is marked where prices differ, and the marks are explained."""
    monkeypatch.setenv("COLUMNS", "80")

    def point(on: str, gpus: float, rate: float, price: float) -> Point:
        figures = {"step_s": 1.08, "step_low_s": 0.9, "step_high_s": 1.4, "fits": 1.0, "gpus": gpus, "mfu": 0.395}
        figures |= {"tokens_per_s": rate, "price": price, "peak_gpu_memory_bytes": 8e10, "gpu_memory_share": 0.97}
        figures |= {"step_exposed_s": 0.0194, "step_bubble_s": 0.0}
        return Point({"on": on, "--mbs": 1}, Result("t", "t.py", figures=figures))

    print_points([point("aws-p4de:8", 64.0, 191_424.0, 3.431), point("dgx-h100:8", 64.0, 485_725.0, 10.0)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    assert ["dgx-h100:8", "1", "best", "64", "1.08", "s", "±23%", "485,725", "7,589", "366.00"] in rows
    assert ["aws-p4de:8", "1", "cheapest", "64", "1.08", "s", "±23%", "191,424", "2,991", "318.64"] in rows
    assert ["dgx-h100:8", "1", "yes", "39.5%", "74.51", "GiB", "97%", "19.4", "ms", "0"] in rows
    assert "best: most tokens/s per GPU; cheapest: least cost of a token" in lines
