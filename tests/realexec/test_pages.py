"""Pages of flight records: post mortem, and a snapshot of a job; a job that has not begun is waited for."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_rings import issue, writer

from distsim.cli import main
from distsim.cli import watch as watching
from distsim.debug.rings import layout as rings
from tests.report.html.pages import Seen, unpacked


def hang(folder: Path) -> None:
    """Two ranks, of which rank 1 never came to the last call; their process is this one, which lives."""
    for rank in range(2):
        ring = writer(folder, rank, 2, "job")
        ring.header(rings.W_JOINED, 1)
        ring.finish(issue(ring, 1), rings.COMPLETED)
        if rank == 0:
            issue(ring, 2, rings.ISSUED | rings.WAITING)


def test_a_post_mortem_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict, its lanes from the rings, and how to see it again."""
    hang(tmp_path)
    assert main(["diagnose", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 3
    seen = Seen((tmp_path / "page.html").read_text())
    assert "HANG missing rank · rank 1" in seen.text
    assert "replay: distsim diagnose" in seen.text
    lanes = unpacked(seen)["documents"]["run"]["picture"]["lanes"]
    assert [lane["ranks"] for lane in lanes] == [[0], [1]]


def test_a_snapshot_shows_who_waits_and_accuses_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The job runs, no monitor has spoken: rank 1 may come yet, and that rank 0 waits for it is drawn all the same."""
    hang(tmp_path)
    assert main(["watch", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    seen = Seen((tmp_path / "page.html").read_text())
    assert "RUNNING" in seen.text
    assert "missing rank" not in seen.text
    (wait,) = unpacked(seen)["documents"]["run"]["picture"]["waits"]
    assert (wait["ranks"], wait["needs"]) == ([0], [1])
    assert (
        "all_reduce #2" in capsys.readouterr().out or "#2: 0" in seen.text or wait["what"].startswith("all_reduce #2")
    )


def test_a_job_that_has_not_begun_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal: a line says so, and the table comes once the first rank has come; here that is while it sleeps."""
    folder = tmp_path / "rings"
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            folder.mkdir()
            hang(folder)
        if len(slept) == 5:
            for path in folder.iterdir():
                os.remove(path)

    monkeypatch.setattr(watching, "time", SimpleNamespace(sleep=sleep))  # not time.sleep itself: other threads sleep
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["watch", str(folder), "--interval", "0.1"]) == 0
    shown = capsys.readouterr()
    assert f"waits for a job to begin in {folder}" in shown.err
    assert shown.err.count("waits for") == 1
    assert slept[:3] == [0.1] * 3


def test_a_pipe_waits_for_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where one snapshot is asked for, nothing to show is one line."""
    assert main(["watch", str(tmp_path)]) == 2
    assert "no rings of distsim here" in capsys.readouterr().err


def test_records_that_are_gone_leave_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run --on gloo --html` of a program that made no process group: its own line, and exit code 2."""
    from distsim.report.html.reports import launch_with_page

    args: Any = type("Args", (), {"html": str(tmp_path / "p.html"), "rings": str(tmp_path), "argv": ["run"]})()
    args.training_script = "train.py"
    assert launch_with_page(lambda: 0, args) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"distsim: --html {tmp_path}/p.html: no page: ")
    assert told.count("\n") == 1
    assert launch_with_page(lambda: 3, args) == 3
