"""Benchmarks are programs that people start by hand."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.house.tree import ROOT, python_files
from tools.benchmarks.arguments import Arguments

ALONE = ("__init__", "arguments", "torch_tests", "coverage", "frameworks", "least_squares", "rows", "training_steps")
"""Not programs, or started by another one."""
FOLDERS = {path.stem: path.parent.name for path in python_files("tools") if path.stem not in ALONE}
NAMES = list(FOLDERS)
COUNT, WORDS = "expected a whole number of at least ", "expected one of "
NUMBERS = {
    "fit --rounds": COUNT + "1",
    "guard_memory --ranks": COUNT + "1",
    "guard_operations --calls": COUNT + "1",
    "guard_operations --ranks": COUNT + "2",
    "guard_overhead --blocks": COUNT + "1",
    "guard_overhead --ranks": COUNT + "1",
    "guard_overhead --sizes": "expected a size as 4, 64K or 1M",
    "guard_postmortem --calls": COUNT + "1",
    "guard_postmortem --ranks": COUNT + "4",
    "guard_soak --collectives": COUNT + "8",
    "guard_soak --ranks": COUNT + "1",
    "guard_stress --minutes": "expected a number above 0",
    "guard_stress --rounds": COUNT + "1",
    "mutants --sample": COUNT + "1",
    "sim_peers": COUNT + "1",
    "sim_scale --ranks": COUNT + "1",
}
WRONG = {
    "guard_latency --only nothing": WORDS,
    "guard_operations --kinds check,": WORDS + "record, check, strict, plain, detail",
    "guard_operations --ops nothing": WORDS + "all_reduce, ",
    "guard_overhead --kinds plain,nothing": WORDS + "check, strict, plain, detail",
    "guard_overhead --sizes 2": "expected a size as 4, 64K or 1M, at least 4",
    "guard_soak --level nothing": WORDS + "off, record, check, strict",
    "guard_stress --level nothing": WORDS + "off, record, check, strict",
    "guard_stress --load many": COUNT + "0",
    "guard_stress --only nothing": "expected a pattern that some healthy program matches",
    "kernels nothing": WORDS,
    "kernels --fit nothing": WORDS,
    "mutants nothing": WORDS,
    "sim_peers 12": "expected a multiple of the 8 ranks of a node",
    "sim_peers --train nothing": "choose from",
    "sim_scale --ranks 12": "expected a multiple of the 8 ranks of a node",
    "torch_suite --arm nothing": "choose from",
    "torch_suite --only FOLDER/nothing": "expected a file that --out has written",
    "torch_suite --only FOLDER/words": "expected a file that --out has written",
    "torch_suite --only FOLDER/empty": "expected a file with tests of the plain arm",
    "torch_suite --only FOLDER/plain --tests nothing": "expected a pattern that some test matches",
    "torch_suite --out FOLDER/nothing/file": "expected a file to write",
}


def start(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of `python -m tools.FOLDER.LINE`."""
    name, *words = line.split()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    benchmark: Any = importlib.import_module(f"tools.{FOLDERS[name]}.{name}")
    with pytest.raises(SystemExit) as stop:
        benchmark.main()
    return int(stop.value.code or 0)


def complaint(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that it ends with."""
    assert start(line, monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{line.split()[0]}.py: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("word", ["0", "-1", "many"])
@pytest.mark.parametrize("line", NUMBERS)
def test_no_count_is_measured_that_is_none(
    line: str, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was expected and what came, in one line."""
    told = complaint(f"{line}{'=' if '--' in line else ' '}{word}", monkeypatch, capsys)
    assert NUMBERS[line] in told
    assert f"got {word!r}" in told


@pytest.mark.parametrize("line", WRONG)
def test_a_word_that_is_not_known_is_one_line(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Names, patterns and files are looked at before anything is measured."""
    (tmp_path / "words").write_text("words\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "plain").write_text('{"test": "Some.test", "arm": "plain", "code": 0}\n')
    line = line.replace("FOLDER", str(tmp_path))
    told = complaint(line, monkeypatch, capsys)
    assert WRONG[line.replace(str(tmp_path), "FOLDER")] in told
    assert repr(line.replace(",", " ").split()[-1] if not line.endswith(",") else "") in told


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fit --from nowhere", "expected nowhere/_index.csv"),
        ("fit --leave-one-out", "expected --from DIR with -o and --leave-one-out"),
    ],
)
def test_a_fit_needs_tables(
    line: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says what is missing."""
    assert words in complaint(line, monkeypatch, capsys)


@pytest.mark.parametrize("name", NAMES)
def test_nobody_takes_a_flag_that_there_is_not(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A benchmark without arguments does not run for minutes where one is given."""
    assert "--nothing" in complaint(f"{name} --nothing", monkeypatch, capsys)


@pytest.mark.parametrize("name", NAMES)
def test_help_says_what_is_measured_beside_whom_and_the_aim(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And how the benchmark is started."""
    monkeypatch.setenv("COLUMNS", "200")
    assert start(f"{name} --help", monkeypatch) == 0
    told = capsys.readouterr().out
    module = ast.parse((ROOT / "tools" / FOLDERS[name] / f"{name}.py").read_text(encoding="utf-8"))
    assert (ast.get_docstring(module) or "").partition("\n")[0] in told
    assert [line for line in told.splitlines() if line.startswith("Peer: ") and " Aim: " in line]
    assert f"\n    python -m tools.{FOLDERS[name]}.{name}" in told


@pytest.mark.slow
def test_who_ends_a_measurement_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C is no fault of the benchmark's, whose own have their traceback."""
    monkeypatch.setattr(sys, "excepthook", None)
    Arguments("A benchmark.")
    for error, told in ((KeyboardInterrupt(), "interrupted\n"), (ValueError("its own"), "ValueError: its own\n")):
        sys.excepthook(type(error), error, None)
        assert capsys.readouterr().err == told


@pytest.mark.soak
def test_torchs_tests_name_a_test_that_is_not_there() -> None:
    """They are a program of their own, in a process of their own."""
    command = [sys.executable, str(ROOT / "tools" / "benchmarks" / "torch_tests.py"), "Nothing.test"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "torch_tests.py: error: expected one of the tests that it lists, got 'Nothing.test'\n"


def test_the_guards_table_fits_80_columns_and_says_its_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounds of 12 to 34 us more, on plain calls of 100 us and 50 ms: the median and its error, for each level."""
    from tools.benchmarks import guard_operations

    rounds = {plain_us: [(plain_us + 12 + 2 * turn, plain_us) for turn in range(12)] for plain_us in (100.0, 50_000.0)}
    slow = [(200_000.0 + 9_000 * turn, 50_000.0) for turn in range(12)]
    found = {
        "all_reduce": dict.fromkeys(guard_operations.GUARDED, rounds[100.0]),
        "reduce_scatter_single async": dict.fromkeys(guard_operations.KINDS, slow),
        "DDP step": {"check": rounds[50_000.0]},
    }
    monkeypatch.setattr(guard_operations, "spawn", lambda *words: {"ranks": [found, found]})
    assert start("guard_operations", monkeypatch) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith("missed")] == []
    # The quartiles are 13 us apart: 1.253 * 13 / 1.349 / sqrt(12) = 3.49.
    assert lines[1].split() == ["all_reduce", "record", "100.0", "1.23±0.03", "+23.0±3.5"]
    assert lines[5].split() == ["all_reduce", "detail", "-"]
    assert [line.split()[2] for line in lines if line.startswith("DDP step")] == ["check"]
    assert lines[-1].startswith("missed, by more than twice the figure's error: all_reduce at record, ")
