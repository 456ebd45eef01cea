"""The live line: a terminal sees it, a pipe a line now and then."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from distsim.report.progress import live_progress, progress_line

NOW = SimpleNamespace(
    virtual_time_s=0.0123,
    ranks_alive=15,
    ranks_total=16,
    events=81_000,
    events_per_s=40_500.4,
    waiting="all_reduce #3",
    wall_s=5.0,
    tracing="",
)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_the_line_says_time_ranks_and_speed() -> None:
    """Virtual time, ranks alive, events a second, what is waited for."""
    assert progress_line(NOW) == (  # type: ignore[arg-type]
        "12.3 ms of virtual time, 15/16 ranks alive, 81,000 events, 40,500/s, all_reduce #3"
    )


def test_a_terminal_sees_the_line_and_is_left_clean() -> None:
    """The cursor is shown again and the line erased at the end."""
    stream = Terminal()
    with live_progress(stream) as report:
        assert report is not None
        report(NOW)  # type: ignore[arg-type]
    text = stream.getvalue()
    assert "15/16 ranks alive" in text
    assert text.rstrip().endswith("\x1b[2K")
    assert "\x1b[?25h" in text


def at(wall_s: float) -> SimpleNamespace:
    """NOW at another wall time, of a job of which a few ranks are traced."""
    return SimpleNamespace(**{**vars(NOW), "wall_s": wall_s, "tracing": "4 of 16 ranks traced, step 2 (about 9 s)"})


@pytest.mark.parametrize("why", ["pipe", "ci", "dumb"])
def test_a_log_gets_a_line_now_and_then(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe, a CI log and a dumb terminal: nothing of a short run, then a short plain line a minute."""
    stream: io.StringIO = io.StringIO() if why == "pipe" else Terminal()
    if why == "ci":
        monkeypatch.setenv("CI", "true")
    if why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    with live_progress(stream) as report:
        assert report is not None
        for wall_s in (0.2, 9.9, 10.0, 12.0, 69.9, 70.0, 131.0):
            report(at(wall_s))  # type: ignore[arg-type]
    lines = stream.getvalue().splitlines()
    assert [line.split(": ")[1] for line in lines] == ["10 s", "70 s", "131 s"]
    assert lines[0] == "distsim: 10 s: 12.3 ms of virtual time, 15/16 ranks alive, 4 of 16 ranks traced, step 2"


def test_quiet_is_quiet() -> None:
    """--quiet gets silence, on a terminal too."""
    for stream in (io.StringIO(), Terminal()):
        with live_progress(stream, quiet=True) as report:
            assert report is None
        assert stream.getvalue() == ""


def test_a_program_that_replaces_print_leaves_the_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`builtins.print = print_pass` of MoCo takes no `file`; the one of MAE puts the time before each line."""
    stream = io.StringIO()
    monkeypatch.setattr("builtins.print", lambda text: None)
    with live_progress(stream) as report:
        assert report is not None
        report(at(60.0))  # type: ignore[arg-type]
    assert stream.getvalue().startswith("distsim: 60 s: 12.3 ms of virtual time")
