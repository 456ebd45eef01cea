"""`distsim scenario` and `distsim sweep` from the command line."""

from __future__ import annotations

import csv
import json
import re
import socket
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from distsim.cli import main
from distsim.errors import UsageError
from distsim.planning.variations import parse_variation
from distsim.scenario.expect.result import NOT_RUN, Result, annotation, write_junit
from distsim.scenario.explore.scenarios import program_hash
from distsim.scenario.file.new import SCHEMA
from distsim.scenario.file.schema import json_schema
from distsim.scenario.suite import matching, slow_imports
from tests.scenario.made import RACE, STEPS, made


def test_a_new_scenario_runs_and_a_wrong_expectation_is_exit_code_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stranger's way: new, run, break it, see the report, in JUnit and as an annotation."""
    monkeypatch.chdir(tmp_path)
    assert main(["scenario", "new", "hang.toml"]) == 0
    assert main(["scenario", "run", "hang.toml"]) == 0
    assert "1 passed, 0 failed" in capsys.readouterr().out
    path = tmp_path / "hang.toml"
    path.write_text(path.read_text().replace('kind = "missing_rank"', 'kind = "healthy"'))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert main(["scenario", "run", ".", "--junit", "out.xml"]) == 5
    out = capsys.readouterr().out
    assert "HANG  missing rank  rank 0" in out
    assert "replay: distsim scenario run hang.toml --seed 0" in out
    assert "::error file=hang.py,line=12,title=scenario" in out
    failure = ET.parse(tmp_path / "out.xml").getroot().find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.text is not None
    assert "Rank 0 never called all_reduce #2" in failure.text


def test_a_wrong_file_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything runs, with every fault of the file."""
    (tmp_path / "x.toml").write_text("program = 'x.py'\nbackend = 'mpi'\n[expect]\nkin = 1\n")
    assert main(["scenario", "run", str(tmp_path / "x.toml")]) == 2
    told = capsys.readouterr().err
    assert "backend: expected 'sim' or 'gloo'" in told
    assert "expect.kin: unknown key" in told
    assert "program: no script x.py" in told


def test_a_wrong_file_among_others_stops_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others run; it is an error of its own with all its faults, in JUnit and on GitHub too. A failed expectation
    is the stronger exit code: a program was found wrong, whatever else could not run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    made(tmp_path, "[expect]")
    made(tmp_path, "[expect]\nkind = 'missing_rank'", name="other")
    (tmp_path / "bad.toml").write_text("program = 'made.py'\nbackend = 'mpi'\n[expect]\nkin = 1\n")
    (tmp_path / "open.toml").write_text("program = 'made.py'\n[expect\n")
    assert main(["scenario", "run", ".", "--junit", "out.xml"]) == 5
    out = capsys.readouterr().out
    assert "1 passed, 1 failed, 2 not run" in out
    assert "\n    backend: expected 'sim' or 'gloo'" in out
    assert "\n    expect.kin: unknown key" in out
    assert "::error file=bad.toml,line=1,title=scenario" in out
    root = ET.parse(tmp_path / "out.xml").getroot()
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("4", "1", "2")
    errors = {case.get("name"): error.text for case in root.iter("testcase") for error in case.findall("error")}
    assert set(errors) == {"bad", "open"}
    assert "expected TOML: " in str(errors["open"])
    assert "expect.kin: unknown key" in str(errors["bad"])
    assert main(["scenario", "run", ".", "-k", "made", "--junit", "out.xml"]) == 0
    assert main(["scenario", "run", ".", "-k", "made or bad"]) == 2


XUNIT = {
    "testsuites": {"name", "time", "tests", "failures", "errors"},
    "testsuite": {"name", "tests", "failures", "errors", "group", "time", "skipped", "timestamp", "hostname", "id",
                  "package", "file", "log", "url"},
    "testcase": {"name", "time", "classname", "group"},
    "failure": {"type", "message"},
    "error": {"type", "message"},
}  # fmt: skip
"""The attributes that Jenkins' xunit plugin allows: junit-10.xsd of jenkinsci/xunit-plugin, elements that we use."""
NEEDED = {"testsuite": {"name", "tests", "failures", "errors", "timestamp", "hostname"}, "testcase": {"name"}}
INSIDE = {"testsuites": {"testsuite"}, "testsuite": {"testcase"}, "testcase": {"failure", "error"}}


def test_junit_is_what_jenkins_takes(tmp_path: Path) -> None:
    """Only elements and attributes of its schema, each where it may stand; when and where the suite ran."""
    odd = Result("a\x00b/<c>", "x.toml", ["expect.kind: \x1b[31m"], report="\udce4", wall_s=1234.5)
    write_junit([odd, Result("n", "y.toml", ["no"], kind=NOT_RUN), Result("f/g", "z.toml")], str(tmp_path / "out.xml"))
    root = ET.parse(tmp_path / "out.xml").getroot()
    assert root.tag == "testsuites"
    for element in root.iter():
        assert set(element.attrib) <= XUNIT[element.tag], element.tag
        assert set(element.attrib) >= NEEDED.get(element.tag, set())
        assert {child.tag for child in element} <= INSIDE.get(element.tag, set())
        assert re.fullmatch(r"(([0-9]{0,3},)*[0-9]{3}|[0-9]{0,3})*(\.[0-9]*)?", element.get("time", "")), element.attrib
    suite = root[0]
    began = datetime.fromisoformat(str(suite.get("timestamp")))
    assert began < datetime.now(UTC) - timedelta(seconds=1200), "it began before its runs took their time"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", str(suite.get("timestamp")))
    assert suite.get("hostname") == socket.gethostname()


def test_wrong_files_alone_are_in_junit_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message is what it is without --junit; a CI server sees the error."""
    (tmp_path / "x.toml").write_text("program = 'x.py'\n[expect]\nkin = 1\n")
    out = tmp_path / "out.xml"
    assert main(["scenario", "run", str(tmp_path), "--junit", str(out)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "x.toml: 2 faults" in said.err
    error = ET.parse(out).getroot().find("testsuite/testcase/error")
    assert error is not None
    assert "expect.kin" in str(error.text)


def test_a_scenario_that_cannot_run_here_is_no_failed_expectation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What only running tells (no network namespaces) is an error as well, with and without --explore."""

    def refuse(*_: object, **__: object) -> None:
        raise UsageError("not here")

    for place in ("explore.scenarios", "run"):  # one imports from the other
        monkeypatch.setattr(f"distsim.scenario.{place}.simulate_scenario", refuse)
    made(tmp_path, "[expect]")
    for flags in ([], ["--explore", "3"]):
        assert main(["scenario", "run", str(tmp_path), *flags, "--junit", str(tmp_path / "out.xml")]) == 2
        assert "not here" in capsys.readouterr().out
        assert ET.parse(tmp_path / "out.xml").getroot().get("errors") == "1"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["-k", "nothing"], "no scenario matches -k 'nothing'"),
        (["-k", "a b"], "expected words with and, or, not"),
        (["-n", "0"], "expected at least one worker"),
        (["--explore", "0"], "expected 'all', a number of runs (200) or a time ('60s'), got '0'"),
        (["--explore", "9", "--replay", "x1:buffered"], "--replay repeats one; give one of the two"),
        (
            ["--explore", "9", "--explore-faults", "rain"],
            "expected some of kill, store-loss, timeout, buffered, got 'rain'",
        ),
        (["--junit", "/nowhere/x.xml"], "no folder /nowhere"),
        (["--junit", "/proc"], "--junit /proc: expected a file, got a folder"),
        (["--junit", "/proc/x.xml"], "--junit /proc/x.xml: cannot be written"),
        (["--schedule", "buffered"], "--schedule: there are none any more"),
        (["--replay", "backwards"], "expected a string that an exploration prints"),
        (["--replay", "x9:1=0.0"], "expected version x1, got x9"),
        (["--replay", "x1:1=0.0-0000"], "got one of another program or of an earlier version of it (hash 0000)"),
        (["--replay", "x1:"], "expected the whole string that an exploration prints, with the hash at its end"),
        (["--replay", "x1:7=0.0"], "with the hash at its end (x1:4=1.0-7f3a), got 'x1:7=0.0'"),
        (["--replay", "x1:buffered", "--backend", "gloo"], "--replay: orders are those of a simulation"),
    ],
)
def test_a_flag_that_does_not_fit(
    tmp_path: Path, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2."""
    made(tmp_path, "[expect]")
    assert main(["scenario", "run", str(tmp_path), *flags]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1


def test_a_new_scenario_makes_its_folder_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """dir/x.toml in a folder that is not there yet, with the schema that its first line names for editors; and below a
    file, where no folder can be."""
    assert main(["scenario", "new", str(tmp_path / "a" / "b" / "hang.toml")]) == 0
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["hang.py", "hang.toml", SCHEMA]
    assert (tmp_path / "a" / "b" / "hang.toml").read_text().startswith(f"#:schema ./{SCHEMA}\n")
    assert json.loads((tmp_path / "a" / "b" / SCHEMA).read_text()) == json.loads(json_schema())
    (tmp_path / "file").touch()
    capsys.readouterr()
    assert main(["scenario", "new", str(tmp_path / "file" / "c" / "hang.toml")]) == 2
    said = capsys.readouterr().err
    assert "cannot be written (Not a directory: " in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("nope.py", "expected a script that exists, found no file "),
        ("nope.py:main", "expected a script that exists, found no file "),
        ("there.py:other", "no function other in "),
        ("there", "expected script.py, script.py:function or module:function"),
    ],
)
def test_a_new_scenario_names_a_program_that_is_there(
    program: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As seen from the new file; one line otherwise, and nothing is written."""
    (tmp_path / "there.py").write_text("def main():\n    pass\n")
    assert main(["scenario", "new", str(tmp_path / "x.toml"), "--program", program]) == 2
    said = capsys.readouterr().err
    assert f"--program {program}: {told}" in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there.py"]
    for good in ("there.py", "there.py:main", "package.module:main"):
        assert main(["scenario", "new", str(tmp_path / f"{len(good)}.toml"), "--program", good]) == 0


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["sweep", "x.toml", "--vary", "seed=1,2", "--csv", "/proc"], "--csv /proc: expected a file, got a folder"),
        (["sweep", "x.toml", "--vary", "seed=1,2", "--plot", "/proc/x.html"], "--plot /proc/x.html: cannot be written"),
        (["sweep", "x.toml", "--vary", "seed=1,2", "--plot", "p.xyz"], "--plot p.xyz: expected a file ending in ."),
        (["scenario", "from", ".", "-o", "/proc/x.toml"], "-o /proc/x.toml: cannot be written"),
        (["sweep", "x.toml", "--vary", "seed=1,2", "--csv", "-"], "--csv -: expected a file, got standard output"),
        (["sweep", "x.toml", "--vary", "seed=1,2", "--plot", "-"], "--plot -: expected a file, got standard output"),
        (["scenario", "run", "x.toml", "--junit", "-"], "--junit -: expected a file, got standard output"),
        (["scenario", "from", ".", "-o", "-"], "-o -: expected a file, got standard output; try -o reproduced.toml"),
        (["watch", ".", "--metrics", "-"], "--metrics -: expected a file, got standard output"),
        (["topo", "show", "dgx-h100", "--graphml", "-"], "--graphml -: expected a file, got standard output"),
        (["html", "x.json", "-o", "-"], "-o -: expected a file, got standard output; try -o report.html"),
        (["diagnose", ".", "--report", "no/r.json"], "--report no/r.json: no folder no; create it first"),
        (["calibrate", "--on", "gloo", "-o", "no/x.toml"], "-o no/x.toml: no folder no; create it first"),
        (["run", "--on", "gloo", "--report", "no/r.json", "x.py"], "--report no/r.json: no folder no; create it first"),
    ],
)
def test_where_a_command_writes_is_told_before_it_works(
    argv: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, exit code 2, and nothing was run: the folder holds no records, and no rank printed."""
    monkeypatch.chdir(tmp_path)
    made(tmp_path, "[expect]", name="x")
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.soak
def test_what_explore_finds_is_annotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On GitHub, at the culprit's line, with the string that repeats it."""
    made(tmp_path, "[expect]", RACE)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert main(["scenario", "run", str(tmp_path), "--explore", "all"]) == 5
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("::error file=made.py,line=12,title=scenario ")
    assert " --replay " in last


@pytest.mark.soak
def test_what_explore_finds_is_in_junit(tmp_path: Path) -> None:
    """A testcase for each scenario; the text of one that fails has the report, and the command that replays it."""
    made(tmp_path, "[expect]")
    made(tmp_path, "[expect]", RACE, name="race")
    out = tmp_path / "out.xml"
    assert main(["scenario", "run", str(tmp_path), "--explore", "all", "--junit", str(out)]) == 5
    cases = {case.get("name"): case for case in ET.parse(out).getroot().iter("testcase")}
    assert [part.tag for part in cases["made"]] == ["system-out"]
    assert "one class: no order of calls makes a difference" in str(cases["made"][0].text)
    failure = cases["race"].find("failure")
    assert failure is not None
    text = str(failure.text)
    assert "2 of 6 classes fail" in text
    assert "receive 3 of rank 0 (line 10) takes the message of rank 1 (usually rank 3)" in text
    assert "AssertionError: rank 1 came last" in text
    assert "\nreplay: distsim scenario run " in text
    assert " --replay " in text


def test_words_choose_scenarios(tmp_path: Path) -> None:
    """As pytest's -k: parts of names, and, or, not."""
    scenario = made(tmp_path, "slow = true\n[expect]")
    words = ("made", "MAD", "not made", "made and slow", "x or made", "(x) and made")
    chosen = {k: matching(k)(scenario) for k in words}
    assert list(chosen.values()) == [True, True, False, True, True, False]


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """`distsim scenario schema > scenario.schema.json`."""
    assert main(["scenario", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$id"] == "urn:distsim:schema:scenario:1"


@pytest.mark.soak
@pytest.mark.slow
def test_workers_give_the_same_results_in_the_same_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-n 2 is only faster."""
    for name in ("a", "b", "c"):
        made(tmp_path, "[expect]\noutput = ['rank 1 has 256']", name=name)
    assert main(["scenario", "run", str(tmp_path), "-n", "2"]) == 0
    lines = [line.split()[1].split("/")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("ok")]
    assert lines == ["a", "b", "c"]


def test_what_takes_long_to_import_is_imported_before_the_first_scenario(tmp_path: Path) -> None:
    """Else the first to use it would be slow for all others; what nobody uses is left alone."""
    plain = made(tmp_path, "[expect]", name="plain")
    trains = made(tmp_path, "[expect]", "from torch.nn.parallel import DistributedDataParallel\n", name="trains")
    assert slow_imports([plain]) == ["distsim.sim"]
    assert slow_imports([plain, trains]) == ["distsim.sim", "torch._dynamo"]
    assert slow_imports([trains.changed(backend="gloo")]) == []


def test_a_sweep_compares_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every combination is a line of the table and of the CSV; a slower link takes longer."""
    made(tmp_path, "faults = [{ what = 'link_slow', link = 'n0/nic0->leaf0', factor = 1.0 }]\n[expect]")
    out = tmp_path / "out.csv"
    flags = ["--vary", "cluster.nodes=1,2", "--vary", "faults[0].factor=1.0,0.1", "--csv", str(out)]
    assert main(["sweep", str(tmp_path / "made.toml"), *flags]) == 0
    assert "busbw all_reduce" in capsys.readouterr().out
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["cluster.nodes"], r["faults[0].factor"]) for r in rows] == [
        ("1", "1.0"),
        ("1", "0.1"),
        ("2", "1.0"),
        ("2", "0.1"),
    ]
    times = [float(r["virtual_time_s"]) for r in rows]
    assert times[0] == times[1] < times[2] < times[3]
    for vary in ("nnodes=1", "env.nodes=1"):  # no slips of cluster.nodes and on.nodes
        assert main(["sweep", str(tmp_path / "made.toml"), "--vary", vary]) == 0


@pytest.mark.slow
def test_a_sweep_says_how_sure_its_times_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An interval a point, in the table and in the CSV, where such a network was measured."""
    on_gpus = STEPS.replace('("gloo")', '("nccl")').replace("1 << 16", "1 << 16, device=f'cuda:{rank % 2}'")
    made(tmp_path, 'on = "dgx-h100:1"\nnproc_per_node = 2\n[expect]', on_gpus)
    out = tmp_path / "out.csv"
    assert main(["sweep", str(tmp_path / "made.toml"), "--vary", "cluster.nodes=2", "--csv", str(out)]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("cluster.nodes", "8 of 10", "times", "within")), shown
    with out.open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        low, time, high = (float(row[f"virtual_time_{end}s"]) for end in ("low_", "", "high_"))
        assert low < time < high


@pytest.mark.parametrize(
    ("vary", "told"),
    [
        ("seed", "expected PATH=VALUE,VALUE"),
        ("faults[2].factor=1", "the scenario has no 2 there"),
        ("nonsense=1", "nonsense: unknown key"),
        ("cluster.nods=1,2", "--vary cluster.nods: expected cluster.nodes=1,2, or on=A,B for whole clusters"),
        ("cluster.nods=1,2", "did you mean 'cluster.nodes'?"),
        ("limits.nodes=1,2", "limits.nodes: unknown key"),
        ("on.node=1,2", "did you mean 'on.nodes'?"),
        ("cluster.links[0]=1", "--vary cluster.links[0]: expected cluster.nodes=1,2"),
        ("on=DGX-H100:1", "did you mean 'dgx-h100'?"),
        ("cluster.nodes=0", "on: "),
    ],
)
def test_a_variation_that_does_not_fit(
    tmp_path: Path, vary: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before anything runs, with the value that does not fit."""
    made(tmp_path, "[expect]")
    assert main(["sweep", str(tmp_path / "made.toml"), "--vary", vary]) == 2
    assert told in capsys.readouterr().err


def test_values_of_a_variation_are_typed() -> None:
    """Numbers and booleans as TOML writes them, all else text."""
    assert parse_variation("x=1,0.5,true,dgx-h100:2").values == (1, 0.5, True, "dgx-h100:2")
    with pytest.raises(UsageError):
        parse_variation("=1")


def test_an_annotation_is_escaped() -> None:
    """GitHub's own characters do not end it early."""
    result = Result("a/b", "x.toml", wrong=["expect.kind: expected a, got b"], report="50%\nnext", site=("/r/p.py", 7))
    text = annotation(result, "/r")
    assert text.startswith("::error file=p.py,line=7,title=scenario a/b%3A expect.kind%3A expected a%2C got b::")
    assert "\n" not in text
    assert "50%25%0Anext" in text
    assert STEPS


def test_a_string_beyond_the_end_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose hash is right."""
    string = f"x1:7=0.0-{program_hash(made(tmp_path, '[expect]'))}"
    assert main(["scenario", "run", str(tmp_path), "--replay", string]) == 2
    assert "step 7: expected 0.0, but the run ended after 0 steps" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--explore", "all"]], ids=["one run", "explored"])
def test_a_report_is_as_wide_as_the_terminal(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe as COLUMNS: all but the command to type and the lines of a traceback."""
    body = RACE.replace("came[-1] != 1", "came[-1] == 9")
    made(tmp_path, "[expect]", body, name="race")
    monkeypatch.chdir(tmp_path)
    for columns, least in ((70, 60), (140, 130)):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["scenario", "run", *flags, "race.toml"]) == 5
        printed = capsys.readouterr().out.splitlines()
        lines = [line for line in printed if "replay: " not in line and 'File "' not in line]
        assert least < max(map(len, lines)) <= columns
        assert any("AssertionError" in line for line in lines)


def test_what_explore_finds_is_on_the_page(tmp_path: Path) -> None:
    """The proof or the failing order, and who came last at which line."""
    made(tmp_path, "[expect]", RACE)
    page = tmp_path / "page.html"
    assert main(["scenario", "run", str(tmp_path), "--explore", "all", "--html", str(page)]) == 5
    text = page.read_text()
    assert "2 of 6 classes fail" in text
    assert "made.py:10: rank 0 last in 6" in text
