"""The commands that make pages: what they write, and every mistake in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distsim.cli import main
from distsim.report.document import report_document
from tests.report.html.pages import Seen, circle, document, unpacked
from tests.report.made import finished

Errors = Callable[[], str]


@pytest.fixture
def errors(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Errors:
    """What went to stderr: one line of ours. The test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def said() -> str:
        text = capsys.readouterr().err
        assert text.count("\n") == 1, text
        assert text.startswith("distsim: ")
        return text

    return said


def written(name: str, data: Any) -> str:
    Path(name).write_text(data if isinstance(data, str) else json.dumps(data))
    return name


def test_a_report_becomes_a_page_beside_it(errors: Errors) -> None:
    """`distsim html REPORT.json` writes REPORT.html, whatever the report says, and its JSON does the same again."""
    report = document(circle())
    assert main(["html", written("hang.json", report)]) == 0
    page = Seen(Path("hang.html").read_text())
    assert "deadlock cycle" in page.text
    written("again.json", unpacked(page)["documents"]["run"])
    assert main(["html", "again.json", "-o", "again.html"]) == 0
    assert Path("again.html").read_text() == Path("hang.html").read_text()


def test_a_plain_report_has_its_verdict_tables_and_cluster(errors: Errors) -> None:
    """What --report wrote is enough for half of the page; the other half says what it lacks."""
    assert main(["html", written("r.json", report_document(finished()))]) == 0
    page = Seen(Path("r.html").read_text())
    assert "FINISHED" in page.text
    assert "n0/gpu0" in page.text
    assert "create it with --html" in page.text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "cut off (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)): copy"),
        ('{"schema": "distsim.report/1", "world_size": 8, "virtual_time_s": 6.5e', "cut off (Expecting ',' delimiter"),
        ('{"schema": "distsim.rep', "cut off (Unterminated string starting at"),
        ('{"schema": "distsim.report/1", "diagnoses": [', "or write it with --report FILE again"),
        (
            "hello",
            "no JSON (Expecting value: line 1 column 1 (char 0)); expected a report: write it with --report FILE",
        ),
        ("", "no JSON"),
        ('{"schema": nonsense, "more": 1}', "no JSON (Expecting value"),
        ("[1, 2]", "not a report of distsim (expected an object, got a list)"),
        ('{"schema": "other/1", "diagnoses": []}', "expected schema 'distsim.report/1', got 'other/1'"),
        ('{"schema": "distsim.report/1"}', "it has no 'diagnoses'"),
        ('{"schema": "distsim.report/1", "diagnoses": [{"kind": "nonsense"}]}', "nonsense"),
        ('{"schema": "distsim.report/2"}', "got 'distsim.report/2': a newer distsim wrote it; upgrade this one"),
        ('{"schema": "distsim.report/1", "diagnoses": [], "picture": {"slices": 3}}', "not a report of distsim"),
        ('{"schema": "distsim.report/1", "diagnoses": [], "links": [{"name": 5}]}', "not a report of distsim"),
        ('{"schema": "distsim.report/1", "diagnoses": [], "ranks": [7]}', "not a report of distsim"),
        ('{"schema": "distsim.report/1", "diagnoses": [], "failures": [{"ranks": "x"}]}', "not a report of distsim"),
    ],
)
def test_a_broken_report_is_one_line(content: str, expected: str, errors: Errors) -> None:
    """No JSON, another's JSON, a damaged one: which file, and what about it; no page is left."""
    assert main(["html", written("r.json", content)]) == 2
    told = errors()
    assert "r.json: " in told
    assert expected in told
    assert not Path("r.html").exists()


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("virtual_time_s",), "abc", "virtual_time_s: expected a number of 0 or more, got 'abc'"),
        (("virtual_time_s",), -3, "virtual_time_s: expected a number of 0 or more, got -3"),
        (("virtual_time_s",), True, "virtual_time_s: expected a number of 0 or more, got True"),
        (("ranks", 0, "end_s"), "1.5", "ranks[0].end_s: expected a number of 0 or more, got '1.5'"),
        (("links", 0, "bytes"), -4, "links[0].bytes: expected a number of 0 or more, got -4"),
        (("world_size",), 2.5, "world_size: expected a whole number of 0 or more, got 2.5"),
        (("seed",), [1], "seed: expected a whole number, got a list"),
        (("version",), 7, "version: expected a text, got 7"),
        (("interrupted",), "no", "interrupted: expected true or false, got 'no'"),
        (("notes",), "all", "notes: expected a list of texts, got 'all'"),
    ],
)
def test_a_figure_that_cannot_be_one_is_told_with_its_place(
    place: tuple[str | int, ...], value: object, told: str, errors: Errors
) -> None:
    """And no page is left, which would show it as if it were measured."""
    report = json.loads(json.dumps(report_document(finished())))
    table: Any = report
    for step in place[:-1]:
        table = table[step]
    table[place[-1]] = value
    assert main(["html", written("r.json", report)]) == 2
    assert f"r.json: not a report of distsim, or a damaged one ({told}); write it with --report FILE" in errors()
    assert not Path("r.html").exists()


def test_a_report_that_is_not_there_is_one_line(errors: Errors) -> None:
    """Which file, and why."""
    assert main(["html", "nowhere.json"]) == 2
    assert "nowhere.json: cannot be read (No such file or directory)" in errors()


COMMANDS = [
    ["run", "--html", "FILE", "train.py"],
    ["run", "--on", "gloo", "--html", "FILE", "train.py"],
    ["bench", "all_reduce", "--html", "FILE"],
    ["diagnose", "records", "--html", "FILE"],
    ["watch", "records", "--html", "FILE"],
    ["scenario", "run", "s.toml", "--html", "FILE"],
    ["sweep", "s.toml", "--vary", "seed=1,2", "--html", "FILE"],
    ["html", "r.json", "-o", "FILE"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:3]))
def test_a_page_in_no_folder_is_refused_before_anything_runs(
    words: list[str], errors: Errors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after an hour: the program, the scenario and the report are not even looked at."""
    Path("train.py").write_text("raise SystemExit('it ran')")
    assert main(["missing/p.html" if word == "FILE" else word for word in words]) == 2
    assert "missing/p.html: no folder missing; create it first" in errors()


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:3]))
def test_without_the_extra_it_says_what_to_install(
    words: list[str], errors: Errors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, before the run."""
    Path("train.py").write_text("raise SystemExit('it ran')")
    monkeypatch.setattr("distsim.text.output_files.find_spec", lambda name: None)
    assert main(["p.html" if word == "FILE" else word for word in words]) == 2
    assert "jinja2 and plotly are not installed; pip install -e '.[html]' in a clone of distsim" in errors()


def test_a_folder_is_no_page(errors: Errors) -> None:
    """The message has a name that would do."""
    Path("out").mkdir()
    assert main(["bench", "all_reduce", "--html", "out"]) == 2
    assert "expected a file, got a folder; try --html out/report.html" in errors()


def test_a_bench_is_two_curves(errors: Errors) -> None:
    """Bus bandwidth and time over the size, with units, from zero; the JSON is that of --json."""
    words = ["bench", "all_reduce", "--on", "dgx-h100:1", "--sizes", "1K,1M", "--html", "bench.html"]
    assert main(words) == 0
    page = unpacked(Seen(Path("bench.html").read_text()))
    layout = page["figures"]["overview-busbw"]["layout"]
    assert layout["yaxis"]["title"]["text"] == "bus bandwidth (GB/s)"
    assert layout["yaxis"]["rangemode"] == "tozero"
    assert [row["size_bytes"] for row in page["overview"]["rows"]] == [1024, 1 << 20]
