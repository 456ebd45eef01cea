"""One line where torch cannot be imported, lacks what the guard needs, or is not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distsim.realexec import install as guard

HIDES = "raise ImportError('libcudart.so.13: cannot open shared object file')"


def ran(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`python -m WORDS` where a file of the user's hides torch."""
    (tmp_path / "torch.py").write_text(HIDES)
    house = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{house}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("words", [(), ("--on", "gloo")])
def test_a_run_is_refused_in_a_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Simulated and real: exit code 2, and the file to rename."""
    (tmp_path / "train.py").write_text("print('ran')")
    refused = ran(tmp_path, "distsim", "run", *words, "train.py")
    assert refused.returncode == 2, refused.stderr
    (line,) = refused.stderr.splitlines()
    assert f"{tmp_path / 'torch.py'} hides it: rename that file" in line


def test_a_script_under_guard_runs_without(tmp_path: Path) -> None:
    """It may need no torch; what it prints and its exit code are its own."""
    (tmp_path / "train.py").write_text("print('ran'); raise SystemExit(7)")
    went = ran(tmp_path, "distsim.debug", "train.py")
    assert (went.returncode, went.stdout) == (7, "ran\n")
    (line,) = went.stderr.splitlines()
    assert line.startswith("distsim: the job runs without a guard: expected torch ")


def test_a_script_that_is_interrupted_shows_its_own_lines(tmp_path: Path) -> None:
    """Ctrl-C reaches each rank; its traceback has the script's frames, as that of another exception."""
    (tmp_path / "train.py").write_text("raise KeyboardInterrupt")
    went = ran(tmp_path, "distsim.debug", "train.py")
    assert went.returncode == -signal.SIGINT
    files = [line.split(", line")[0].strip() for line in went.stderr.splitlines() if line.startswith("  File ")]
    assert files == ['File "train.py"']


def test_diagnose_and_doctor_need_no_torch(tmp_path: Path) -> None:
    """`diagnose` reads the folder, `doctor` says what is wrong with torch."""
    (tmp_path / "rings").mkdir()
    found_none = ran(tmp_path, "distsim", "diagnose", "rings")
    assert (found_none.returncode, "neither rings of distsim" in found_none.stderr) == (2, True)
    report = ran(tmp_path, "distsim", "doctor")
    assert report.returncode == 0
    assert "Traceback" not in report.stdout + report.stderr
    assert report.stdout.count("hides it: rename that file") == 1
    assert report.stdout.count("refused, as torch above") == 4


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process is the first rank of its host, and nothing of the guard's outlasts the test."""
    for name in ("LOCAL_RANK", "DISTSIM_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    yield
    guard.remove()


def test_a_torch_that_lacks_what_the_guard_needs(
    unguarded: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job goes on, and one line says that it is not guarded."""
    monkeypatch.setattr(guard, "guard_refusal", lambda: "torch 9.9 lacks torch._gone (ends of calls)")
    guard.install(dir="rings")
    assert not guard.installed()
    expected = "distsim: the job runs without a guard: torch 9.9 lacks torch._gone (ends of calls)\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("side", [0, 1])
def test_a_guard_that_cannot_be_put_on_an_untested_torch(
    unguarded: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], side: int
) -> None:
    """There the job goes on without; on a tested release the exception is a defect of ours, and seen."""

    def broken(*args: Any) -> None:
        raise TypeError("type is not subscriptable")

    monkeypatch.setattr(guard, "_install_hooks", broken)
    monkeypatch.setattr(guard, "compared", lambda version, part: side)
    if side:
        guard.install(dir="rings")
        assert not guard.installed()
        assert "not tested, and TypeError: type is not subscriptable" in capsys.readouterr().err
    else:
        with pytest.raises(TypeError):
            guard.install(dir="rings")
