"""What a person reads at the end of a run."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from distsim.debug.records import CallWait, Evidence, Phase, RankState, Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.debug.report.console import Console as PlainConsole
from distsim.debug.report.console import plain_text
from distsim.report import Summary, print_summary
from distsim.report.tables import plain_table
from distsim.sim.outcome import CollectiveTotal, Failure, LinkUse
from distsim.text.units import plural
from tests.golden import assert_golden
from tests.report.made import call, finished, outcome, raised, summary

GOLDEN = Path(__file__).parent / "golden"


def _text(run: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    console.print(Summary(run, with_wall_time=False))  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("make", [finished, raised])
def test_the_summary_reads_as_it_did(make: object, width: int) -> None:
    """The whole text, at the two usual widths."""
    assert callable(make)
    assert_golden(GOLDEN / f"{make.__name__}_{width}.txt", _text(make(), width))


def test_no_line_is_wider_than_the_terminal() -> None:
    """At 80 columns everything fits, and nothing is cut short."""
    text = _text(finished())
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text


def test_a_run_that_failed_at_once_has_no_table_of_zeros() -> None:
    """Nobody computed or called anything before the exception; a run that did nothing and ended well shows it."""
    parts = {"compute_s": 0.0, "communication_s": 0.0, "exposed_s": 0.0, "idle_s": 0.0}
    run = raised()
    assert "time by rank" in _text(run)
    run.ranks = [replace(rank, **parts) for rank in run.ranks]  # type: ignore[arg-type]
    assert "time by rank" not in _text(run)
    run.exit_code = 0
    assert "time by rank" in _text(run)


def test_a_hang_has_no_tables() -> None:
    """The verdict is not pushed off the screen by times that nobody asks for; notes stay."""
    run = finished()
    run.exit_code = 3
    run.notes = ["a note"]
    text = _text(run)
    assert "hung after" in text
    assert text.rstrip().endswith("note: a note")
    for title in ("time by rank", "collectives (", "busiest links"):
        assert title not in text


def test_the_first_line_of_a_failed_run_is_who_raised_what() -> None:
    """The verdict comes before the tables."""
    assert _text(raised()).splitlines()[0] == "RAISED  ranks 0,1: ValueError: no <dog 0x...>"


def test_a_traceback_that_a_diagnosis_has_shown_is_not_shown_again() -> None:
    """One traceback a rank: the diagnosis of a rank that raised has it already."""
    run = raised()
    run.diagnoses = [Diagnosis(Kind.RANK_RAISED, (0, 1), explanation="Ranks 0,1 raised ValueError.")]
    states = {r: RankState(r, Phase.RAISED) for f in run.failures for r in f.ranks}
    for failure in run.failures:
        states[failure.ranks[0]].traceback = failure.traceback
    run.evidence = Evidence(4, states)
    text = _text(run)
    assert "RAISED  rank 3: ValueError: no cat" in text
    assert "RAISED  ranks 0,1" not in text
    assert "traceback of ranks 0,1:" in text  # their addresses differ, and nothing else
    assert text.count("boom(<dog 0x...>)") == 1


def test_a_traceback_that_no_diagnosis_shows_is_kept() -> None:
    """A diagnosis shows few different tracebacks: the others follow below it."""
    run = raised()
    run.diagnoses = [Diagnosis(Kind.RANK_RAISED, (0, 1, 3), explanation="Ranks 0,1,3 raised.")]
    run.failures = [Failure((r,), "ValueError", f"no {r}", f"ValueError: no {r}") for r in (0, 1, 3)]
    states = {f.ranks[0]: RankState(f.ranks[0], Phase.RAISED, traceback=f.traceback) for f in run.failures}
    run.evidence = Evidence(4, states)
    text = _text(run)
    assert "RAISED  rank 3: ValueError: no 3" in text
    assert text.count("RAISED") == 1


def test_many_equal_ranks_are_one_row() -> None:
    """A thousand ranks that ran alike take one line, and the odd one its own."""
    ranks = [summary(rank) for rank in range(1024)]
    ranks[17] = summary(17, end_s=0.5)
    text = _text(outcome(1024, ranks=ranks))
    assert "0-16,18-1023  1023 ranks" in text
    assert "   17  n2/gpu1" in text


def test_many_different_ranks_are_a_spread_that_names_the_slowest() -> None:
    """Beyond sixteen different rows: minimum, median, maximum and whose the maximum is."""
    ranks = [summary(rank, end_s=0.010 + 0.001 * (rank % 40)) for rank in range(80)]
    text = _text(outcome(80, ranks=ranks))
    lines = text.splitlines()
    row = next(line for line in lines if line.startswith("maximum"))
    assert row.split()[1:3] == ["49", "ms"]
    assert next(line for line in lines if line.startswith("largest on")).split()[2:4] == ["rank", "39"]


def test_a_long_list_of_ranks_is_cut() -> None:
    """Every second rank of a thousand fits its column."""
    ranks = [summary(rank, end_s=0.010 * (1 + rank % 2)) for rank in range(1000)]
    text = _text(outcome(1000, ranks=ranks))
    assert "0,2,4,6,8,10,12,...  500 ranks" in text


def test_groups_of_one_name_that_are_alike_are_one_row() -> None:
    """Eleven stages' mesh_tp have one row with the mean of them, and the twelfth, which is slower, its own."""
    times_s = [0.010 + 0.00001 * place for place in range(11)] + [0.030]
    totals = [
        CollectiveTotal("mesh_tp", "all_reduce", "bfloat16", 8, 4, 1000, time_s, 1000 / time_s, 1750 / time_s)
        for time_s in times_s
    ]
    totals.append(CollectiveTotal("mesh_tp", "barrier", "", 8, 1, 0, 0.010, 0.0, 0.0))
    text = _text(outcome(96, collectives=totals), 120)
    rows = [line.split() for line in text.splitlines() if line.startswith("mesh_tp")]
    assert [row[:5] for row in rows] == [
        ["mesh_tp", "all_reduce", "bfloat16", "4", "1000"],
        ["mesh_tp,", "11", "groups", "all_reduce", "bfloat16"],
        ["mesh_tp", "barrier", "1", "0", "B"],
    ]
    assert "10.1 ms" in text


def test_an_interrupted_run_says_where_every_rank_is() -> None:
    """Ctrl-C shows who waits for what and who runs, equal ranks together."""
    waiting = CallWait(call(0, "all_reduce", 2, 0.001, 0.003, 0.004))
    states = {rank: RankState(rank, Phase.BLOCKED, (waiting,)) for rank in (0, 1, 2)}
    states[3] = RankState(3, Phase.RUNNING, site=Site("train.py", 9, "load"))
    run = outcome(4, exit_code=130, interrupted=True, evidence=Evidence(4, states))
    lines = _text(run, 120).splitlines()
    assert lines[:3] == [
        "INTERRUPTED",
        "  Ranks 0-2 wait in all_reduce #2 on group default_pg (ranks 0,1), at train.py:12",
        "  Rank 3 is at train.py:9 in load",
    ]
    assert "interrupted after 10 ms" in lines[5]


def test_ranks_that_left_without_a_word_are_named_with_their_exit_code() -> None:
    """`os._exit(7)` leaves no traceback; the report says who did it."""
    ranks = [summary(rank, exit_code=7 if rank != 2 else 0) for rank in range(4)]
    assert _text(outcome(4, exit_code=1, ranks=ranks)).splitlines()[:2] == [
        "EXITED",
        "  Ranks 0,1,3 left with exit code 7",
    ]


def test_lines_of_a_traceback_stay_whole() -> None:
    """A path or a message is not broken where the terminal ends: it has to be copied."""
    run = raised()
    run.failures[0].traceback += "x" * 300
    file = io.StringIO()
    print_summary(run, file)
    assert "x" * 300 in file.getvalue()
    assert "  \n" not in file.getvalue()


def test_idle_links_are_not_listed() -> None:
    """Three rows at least, then only links that were busy; the others are counted."""
    run = finished()
    run.links = [
        LinkUse(f"a{n}->b", "fabric", 1e9, 100.0 * (n + 1), 0.1, mean, 1.0)
        for n, mean in enumerate((0.0011, 0.5, 0.3, 0.2, 0.002, 0.0, 0.0))
    ]
    text = _text(run)
    rows = text[text.index("busiest links") :].splitlines()[2:]
    assert [row.split()[0] for row in rows[:3]] == ["a1->b", "a2->b", "a3->b"]
    assert rows[3] == "and 4 more links: --report FILE has all"


def test_links_used_alike_are_one_row() -> None:
    """The busiest comes first, its equals are counted, unused ones are left out."""
    text = _text(finished())
    links = text[text.index("busiest links") :].splitlines()[2:4]
    assert links[0].split()[:2] == ["n0/nic0->leaf0", "50.0"]
    assert links[1].split()[:2] == ["n0/gpu0->n0/nvswitch0", "x2"]
    assert "n0/gpu0->n0/gpu0" not in text


def test_without_a_terminal_the_summary_is_plain_text_120_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or a CI log gets no escape codes and no accidental width."""
    monkeypatch.delenv("COLUMNS", raising=False)
    file = io.StringIO()
    print_summary(finished(), file)
    text = file.getvalue()
    assert "\x1b" not in text
    assert "1.25 s of wall time" in text


@pytest.mark.parametrize("width", [12, 40, 120])
def test_without_a_terminal_no_line_ends_with_blanks(width: int) -> None:
    """Tables pad their last column, and words leave the blank after them at the end of a full line."""
    table = plain_table("name", "what")
    table.add_row("a", "short")
    table.add_row("b", "a longer text than that of the other row")
    file = io.StringIO()
    PlainConsole(file=file, width=width).print(table)
    PlainConsole(file=file, width=width).print("words that fill more lines than one of twelve columns")
    assert [line for line in file.getvalue().splitlines() if line != line.rstrip()] == []
    assert file.getvalue().startswith("name" if width > 12 else "na")
    assert plain_text(table, width) in file.getvalue()


@pytest.mark.parametrize(("count", "words"), [(1, "1 more line"), (0, "0 more lines"), (20, "20 more lines")])
def test_a_number_and_its_noun_agree(count: int, words: str) -> None:
    """One is no plural."""
    assert plural(count, "more line") == words
