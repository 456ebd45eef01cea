"""`distsim sweep --plot` and `--html`: from points made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distsim.cli import main
from distsim.planning.variations import Point
from distsim.scenario.expect.result import Result


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    """Three points of `step.toml`, the last of which hung; none is run."""
    made = [
        Point({"cluster.nodes": n}, Result("step", "step.toml", figures={"virtual_time_s": 0.004 * n, "events": 9.0}))
        for n in (1, 2, 4)
    ]
    made[2].result.kind, made[2].result.exit_code = "deadlock_cycle", 3

    def sweep(*args: Any, **more: Any) -> list[Point]:
        return made

    monkeypatch.setattr("distsim.planning.variations.sweep", sweep)
    monkeypatch.setattr("distsim.scenario.load_scenario", lambda path: None)
    return made


SWEEP = ["sweep", "step.toml", "--vary", "cluster.nodes=1,2,4"]


def test_a_plot_has_a_title_units_and_zero(points: list[Point], tmp_path: Path) -> None:
    """What is drawn is said, in which unit, and the axis begins at nothing."""
    assert main([*SWEEP, "--plot", str(tmp_path / "p.html")]) == 0
    drawn = (tmp_path / "p.html").read_text()
    for text in ("step: virtual time by cluster.nodes", "virtual time (ms)", '"rangemode":"tozero"'):
        assert text in drawn


@pytest.mark.parametrize(("columns", "tables"), [(80, 2), (160, 1)])
def test_a_table_is_no_wider_than_the_pipe(
    points: list[Point],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    columns: int,
    tables: int,
) -> None:
    """Bandwidths stand below where they do not fit beside the times; no word is cut."""
    for point in points:
        point.result.figures.update({f"busbw.{op}": 1e9 for op in ("all_gather", "all_reduce", "reduce_scatter")})
        point.result.figures["busbw.barrier"] = 0.0
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(SWEEP) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= columns
    assert sum("──" in line for line in said.splitlines()) == tables
    assert "busbw reduce_scatter" in said
    assert "barrier" not in said
    assert "…" not in said


def test_a_page_marks_the_point_that_failed(
    points: list[Point], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table and the page come from the same points."""
    assert main([*SWEEP, "--html", str(tmp_path / "p.html")]) == 0
    assert capsys.readouterr().err == f"wrote {tmp_path}/p.html\n"
    page = (tmp_path / "p.html").read_text()
    assert "3 points of step.toml, 1 of them failed" in page
    assert '<td class="bad">deadlock_cycle</td>' in page


@pytest.mark.parametrize("flag", ["--html", "--plot"])
def test_a_figure_that_no_point_has_is_one_line(
    flag: str, points: list[Point], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message lists those there are."""
    assert main([*SWEEP, flag, str(tmp_path / "p.html"), "--figure", "speed"]) == 2
    assert "--figure speed: no such figure; there are events, virtual_time_s" in capsys.readouterr().err
