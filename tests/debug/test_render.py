"""What a person reads: golden texts at 80 and 120 columns, without colour; colour only on a terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import Evidence, Finding, Group, Phase, RankState, Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.debug.report.render import render_diagnoses
from tests.debug.builders import FILE, all_reduce, barrier, fail, finish, group, killed, play, recv, run, send, spin
from tests.golden import assert_golden

GOLDEN = Path(__file__).parent / "golden"
DP = Group("7", "dp", tuple(range(8)))
MAIN = Site(FILE, 210, "main")
TEXT = "\n" * 9 + "    dist.all_reduce(grad)\n    dist.barrier()\n"


def data_loader() -> Evidence:
    """One of eight ranks is still in its data loader."""
    evidence = play(
        8,
        lambda r: [
            all_reduce(131, DP, shape=(4096, 1024), callers=(MAIN,), function="step"),
            *([run()] if r == 3 else [all_reduce(131, DP, shape=(4096, 1024), callers=(MAIN,), function="step")]),
        ],
        hang_after_s=30.0,
        now_s=31.2,
        notes=["host 0 reads its data over NFS"],
    )
    state = evidence.ranks[3]
    state.site, state.since_s = Site(FILE, 88, "epoch"), 0.008
    state.stack = (Site("/usr/lib/python3/torch/utils/data/dataloader.py", 52, "__next__"), state.site, MAIN)
    return evidence


def raised() -> Evidence:
    """A traceback, source lines, and two more ranks of another fault."""
    evidence = play(
        6,
        lambda r: {1: [all_reduce(10), fail("ValueError: bad batch", 11)], 4: [all_reduce(10), killed()]}.get(
            r, [all_reduce(10), barrier(11)]
        ),
        sources={FILE: TEXT},
    )
    evidence.ranks[1].traceback = (
        'Traceback (most recent call last):\n  File "train.py", line 11, in main\n'
        '    raise ValueError("bad batch")\nValueError: bad batch\n'
    )
    return evidence


def opposite_groups() -> Evidence:
    tp, dp = group(0, 1, name="1", desc="tp"), group(0, 1, name="2", desc="dp")
    return play(3, {0: [all_reduce(10, tp), barrier(30)], 1: [all_reduce(20, dp), barrier(30)], 2: [barrier(30)]})


def shapes() -> Evidence:
    return play(64, lambda r: [all_reduce(10, shape=(4, 7 if r in (5, 6, 7, 40) else 8))])


def tags() -> Evidence:
    return play(2, {0: [send(1, 10, tag=5)], 1: [recv(0, 11, tag=7)]})


def nan() -> Evidence:
    evidence = play(2, lambda r: [all_reduce(10)])
    text = "rank 1 brought 3 NaN into it, the first at element 17"
    evidence.findings = [Finding(Kind.NAN, (1,), text, call=evidence.records[1][0], at_s=0.001)]
    return evidence


def straggler() -> Evidence:
    return play(4, lambda r: [run(88)] if r == 2 else [all_reduce(10)], straggler_after_s=1.0, now_s=9.0)


def scattered() -> Evidence:
    """Many different places: the text is cut, the data are not."""
    return play(16, lambda r: [spin(5)] if r == 0 else [recv(r - 1, 100 + r)])


CASES = {f.__name__: f for f in (data_loader, raised, opposite_groups, shapes, tags, nan, straggler, scattered)}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", CASES)
def test_report(name: str, width: int) -> None:
    """The report is what the golden file shows, and no line is wider than the console."""
    evidence = CASES[name]()
    text = render_diagnoses(diagnose(evidence), evidence).plain(width)
    assert_golden(GOLDEN / f"{name}_{width}.txt", text)
    assert max(map(len, text.splitlines())) <= width


def test_a_long_traceback_stays_whole() -> None:
    """Neither its head nor its foot is cut."""
    evidence = raised()
    frames = "".join(f'  File "train.py", line {n}, in f{n}\n' for n in range(60))
    evidence.ranks[1].traceback = f"Traceback (most recent call last):\n{frames}ValueError: bad batch\n"
    text = render_diagnoses(diagnose(evidence), evidence).plain(120)
    assert "Traceback (most recent call last)" in text
    assert all(f"in f{n}\n" in text for n in range(60))


def test_a_line_of_a_traceback_is_not_wrapped() -> None:
    """Code stays as it was written, with its carets below it, in a narrow terminal, too."""
    evidence = raised()
    code = "    " + "value = f(" + ", ".join(f"argument{n}" for n in range(20)) + ")"
    evidence.ranks[1].traceback = f'Traceback (most recent call last):\n  File "train.py", line 1\n{code}\nValueError\n'
    text = render_diagnoses(diagnose(evidence), evidence).plain(80)
    assert f"    {code}\n" in text


def test_a_frame_that_calls_itself_is_shown_once() -> None:
    """Equal frames one below the other are counted, not repeated."""
    evidence = data_loader()
    deep = (Site("train.py", 9, "leaf"), *[Site("train.py", 7, "walk")] * 50, Site("train.py", 3, "main"))
    evidence.ranks[3].stack = deep
    text = render_diagnoses(diagnose(evidence), evidence).plain(120)
    assert text.count("walk  train.py:7") == 1
    assert "walk  train.py:7  (50 times)" in text
    assert "leaf  train.py:9" in text


def test_first_line_names_verdict_culprit_and_place() -> None:
    """Who is not there stands in the first line."""
    evidence = data_loader()
    first = render_diagnoses(diagnose(evidence), evidence).plain(120).splitlines()[0]
    assert first.startswith("HANG  missing rank  rank 3  all_reduce #2 on group dp (ranks 0-7)")
    assert first.endswith("after 31.2 s")


def _odd_ranks_raise(size: int) -> Evidence:
    """Every other rank raised at its own piece of the list."""
    return play(size, lambda r: [all_reduce(10), fail("ValueError: bad batch", 11) if r % 2 else barrier(12)])


@pytest.mark.parametrize("width", [80, 120])
def test_many_pieces_of_ranks_fit_a_headline(width: int) -> None:
    """The first few, how many more, and all that follows them; the whole list once, and as data."""
    evidence = _odd_ranks_raise(40)
    evidence.now_s += 31.2
    found = diagnose(evidence)
    text = render_diagnoses(found, evidence).plain(width)
    lines = text.splitlines()
    assert lines[0].startswith("ERROR  rank raised  ranks 1,3,5,7 and 16 more  barrier #2")
    assert lines[0].endswith("after 31.7 s")
    assert max(map(len, lines)) <= width
    assert all(line.startswith(" ") for line in lines[1:])
    whole = ",".join(map(str, range(1, 40, 2)))
    assert (text.count(whole), text.count("ranks 1,3,5,7 and 16 more")) == (1, 3)
    assert "last call of ranks 1,3,5,7 and 16 more: all_reduce #1" in text
    assert found[0].to_json()["culprits"] == list(range(1, 40, 2))


@pytest.mark.parametrize("width", [40, 80])
def test_the_whole_list_stands_in_the_report_however_long_it_is(width: int) -> None:
    """In a line of its own, or as many as it takes; in the sentence that is data it stays short."""
    evidence = _odd_ranks_raise(400)
    (told,) = diagnose(evidence)
    assert "Ranks 1,3,5,7,9,11,13,15,17,19,21,23,...,399 (200 of them) raised" in told.explanation
    whole = ",".join(map(str, range(1, 400, 2)))

    def report(of: Diagnosis) -> str:
        text = render_diagnoses([of], evidence).plain(width)
        assert max(map(len, text.splitlines())) <= width
        return "".join(text.split())

    assert report(told).count(f"allofthem:ranks{whole}") == report(told).count(whole) == 1
    text = report(replace(told, explanation="Some raised."))
    assert text.count(f"Someraised.allofthem:ranks{whole}") == text.count(whole) == 1


def test_a_list_that_stands_nowhere_else_is_whole() -> None:
    """Culprits who differ in their last calls: each list is the only one."""
    evidence = _odd_ranks_raise(40)
    for rank in range(1, 20, 2):
        evidence.records[rank][-1].site = MAIN
    text = render_diagnoses(diagnose(evidence), evidence).plain(120)
    assert "last call of ranks 1,3,5,7,9,11,13,15,17,19: all_reduce" in text


def test_a_headline_that_does_not_fit_goes_on_below() -> None:
    """Nothing that follows is lost, and nothing stands in the first column that is no verdict."""
    evidence = _odd_ranks_raise(40)
    evidence.now_s += 31.2
    lines = render_diagnoses(diagnose(evidence), evidence).plain(40).splitlines()
    assert lines[:2] == ["ERROR  rank raised  ranks 1,3,5,7 and 16", "  more  barrier #2  after 31.7 s"]


def test_all_ranks_raised() -> None:
    """Nobody is left who might wait: that is said, not that nobody waits."""
    alike = play(4, lambda r: [all_reduce(10), fail("ValueError: bad batch", 11)])
    (told,) = diagnose(alike)
    assert told.explanation == "Ranks 0-3 raised ValueError: bad batch, at train.py:11 in main. That is every rank."
    alone = play(1, {0: [fail("ValueError: bad batch", 11)]})
    assert diagnose(alone)[0].explanation == "Rank 0 raised ValueError: bad batch, at train.py:11 in main."
    apart = play(2, lambda r: [fail(f"ValueError: bad {'ab'[r]}", 11)])
    assert [d.explanation.partition("in main. ")[2] for d in diagnose(apart)] == [
        "Every other rank has raised, too."
    ] * 2
    some = play(2, {0: [fail("ValueError: bad batch", 11)], 1: [finish()]})
    assert diagnose(some)[0].explanation.endswith("No other rank waits for it.")


@pytest.mark.parametrize("phase", [Phase.KILLED, Phase.EXITED])
def test_who_went_another_way_has_not_raised_too(phase: Phase) -> None:
    """Of a rank that was killed, or left, while all others raised; several that nobody waits for are "them"."""

    def told(size: int) -> dict[tuple[int, ...], str]:
        evidence = play(size, lambda r: [run(11)] if r == 4 else [fail("ValueError: bad batch", 11)])
        evidence.ranks[1] = RankState(1, phase)
        return {d.culprits: d.explanation for d in diagnose(evidence)}

    assert told(4)[1,].endswith(". Every other rank has raised.")
    assert told(5)[1,].endswith(". No other rank waits for it.")
    assert told(5)[0, 2, 3].endswith(". No other rank waits for them.")


def test_a_note_is_shown_with_the_first_diagnosis() -> None:
    """It is about the run, and is not repeated with each further diagnosis."""
    evidence = replace(raised(), notes=["the clock is virtual"])
    text = render_diagnoses(diagnose(evidence), evidence).plain()
    first, _, second = text.partition("\n\n")
    assert (first.count("the clock is virtual"), second.count("the clock is virtual")) == (1, 0)
    assert "rank 4" in second


def test_healthy() -> None:
    """An empty list is one friendly line."""
    assert render_diagnoses([]).plain() == "HEALTHY  no hang and no inconsistent collective\n"


def test_without_evidence() -> None:
    """A diagnosis read back from JSON can be shown alone."""
    text = render_diagnoses(diagnose(shapes())).plain()
    assert "MISMATCH  shape mismatch  ranks 5-7,40" in text


def test_colour_only_on_a_terminal() -> None:
    """Piped output has no escape codes, a terminal gets them."""
    evidence = shapes()
    report = render_diagnoses(diagnose(evidence), evidence)
    piped, terminal = io.StringIO(), io.StringIO()
    Console(file=piped, width=80).print(report)
    Console(file=terminal, width=80, force_terminal=True, color_system="truecolor").print(report)
    assert "\x1b" not in piped.getvalue()
    assert "\x1b[1;31mMISMATCH" in terminal.getvalue()


def test_the_processes_of_the_culprits_are_named() -> None:
    """Host, pid and the folder of the records, which is on that host."""
    evidence = play(4, lambda r: [] if r in (1, 3) else [all_reduce(10)])
    for rank, host in ((0, "node0"), (1, "node1"), (3, "node1")):
        evidence.ranks[rank].host, evidence.ranks[rank].pid, evidence.ranks[rank].folder = (
            host,
            100 + rank,
            "/dev/shm/j",
        )
    text = " ".join(render_diagnoses(diagnose(evidence), evidence).plain(80).split())
    assert "rank 1 is pid 101, rank 3 is pid 103 on host node1; records: /dev/shm/j" in text
    assert "pid 100" not in text
