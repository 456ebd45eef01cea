"""Events of a job as JSON lines, the command at its verdict, its metrics, and where its report is."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from distsim.cli.dispatch import main
from distsim.debug.diagnosis.pace.statistic import Outlook
from distsim.debug.records import Group
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind, Proof
from distsim.debug.report import live
from distsim.debug.report import news as module
from distsim.debug.report.news import Events, report_files, save_report
from tests.debug.builders import all_reduce
from tests.debug.test_monitor import Watching, waiting
from tests.documents import checked

HANG = Diagnosis(Kind.MISSING_RANK, (1,), (0,))
SLOW = Diagnosis(Kind.STRAGGLER, (1,))
REPORT: dict[str, Any] = {"exit_code": 3, "job": "j", "world_size": 2, "rings": "/r", "diagnoses": [HANG.to_json()]}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [checked(line) for line in path.read_text().splitlines()]


def test_every_event_is_a_line_with_the_schema(tmp_path: Path) -> None:
    """Its own keys, and those that all have; the end is written once."""
    events = Events(str(tmp_path / "e"), "")
    events.diagnosed([SLOW, HANG], REPORT)
    events.withdrawn(SLOW, "it went on", REPORT)
    events.finished(REPORT)
    events.finished(REPORT)
    lines = lines_of(tmp_path / "e")
    assert [line["event"] for line in lines] == ["straggler", "verdict", "withdrawn", "finished"]
    for line in lines:
        assert {"schema", "event", "unix_s", "host", "job", "world_size", "rings"} <= line.keys()
        assert line["schema"] == "distsim.events/1"
    assert lines[1]["diagnosis"] == HANG.to_json()
    assert lines[2]["text"] == "it went on"
    assert (lines[3]["exit_code"], lines[3]["elapsed_s"] >= 0) == (3, True)


def test_a_monitor_writes_its_warning_and_its_withdrawal(tmp_path: Path) -> None:
    """As it prints them; the file grows."""
    monitor = Watching(tmp_path, waiting(all_reduce(11)))
    monitor.report._events = Events(str(tmp_path / "e"), "")
    monitor.report.diagnoses = [Diagnosis(Kind.MISSING_RANK, (0,), proof=Proof.NOT_YET)]
    monitor._withdraw()
    monitor.tell([SLOW], monitor.look())
    assert [line["event"] for line in lines_of(tmp_path / "e")] == ["withdrawn", "straggler"]


def test_a_report_on_standard_output_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end of the job, whole, however often a file would have been written; no file is named -."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rings").mkdir()
    monkeypatch.setenv("DISTSIM_REPORT", "-")
    report = Watching(tmp_path / "rings", waiting(all_reduce(11))).report
    report.save()
    report.save()
    assert capsys.readouterr().out == ""
    report.finish()
    assert checked(capsys.readouterr().out)["schema"] == "distsim.report/1"
    assert not (tmp_path / "-").exists()


@pytest.mark.parametrize(
    ("command", "limit_s", "line"),
    [
        ("cat > got", 10.0, ""),
        ("exit 7", 10.0, "--on-verdict: 'exit 7' failed (exit code 7); the job's outcome is not changed by that"),
        ("kill -9 $$", 10.0, "failed (signal 9)"),
        ("sleep 1000", 0.05, "did not end within 0 s, and was ended"),
    ],
)
def test_a_command_runs_once_and_its_failure_is_a_line(
    command: str, limit_s: float, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the report as its input; one that hangs is ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "COMMAND_S", limit_s)
    said: list[str] = []
    events = Events("", command, said.append)
    events.diagnosed([SLOW], REPORT)
    assert events._commands == []
    events.diagnosed([HANG], REPORT)
    events.diagnosed([HANG], REPORT)
    events.finished(REPORT)
    assert len(events._commands) == 1
    assert [line in one for one in said] == [True] * bool(line)
    if not line:
        assert json.loads((tmp_path / "got").read_text()) == REPORT


@pytest.mark.parametrize("place", ["missing/e", "fifo"])
def test_a_file_that_cannot_be_written_is_one_line(place: str, tmp_path: Path) -> None:
    """Once; a FIFO that nobody reads does not hold the job."""
    os.mkfifo(tmp_path / "fifo")
    said: list[str] = []
    events = Events(str(tmp_path / place), "", said.append)
    events.diagnosed([HANG, HANG], REPORT)
    events.finished(REPORT)
    assert len(said) == 1
    assert said[0].startswith(f"no events in {tmp_path / place} (")


@pytest.mark.parametrize(
    ("wanted", "environ", "names"),
    [
        ("", {}, []),
        ("r.json", {}, ["r.json"]),
        ("new/", {}, ["job.json", "job.txt"]),
        (".", {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}, ["slurm-7.2.json", "slurm-7.2.txt"]),
        (".", {"TORCHELASTIC_RUN_ID": "../a b"}, ["_a_b.json", "_a_b.txt"]),
        (".", {"TORCHELASTIC_RUN_ID": "none"}, ["job.json", "job.txt"]),
    ],
)  # fmt: skip
def test_the_report_is_in_one_known_place(wanted: str, environ: dict[str, str], names: list[str]) -> None:
    """A file, or two in a folder, named after the job."""
    assert [os.path.basename(path) for path in report_files(wanted, "job", environ)] == names


def test_a_report_in_a_folder_has_its_text_beside_it(tmp_path: Path) -> None:
    """The folder is made; what the monitor printed is there to read."""
    monitor = Watching(tmp_path / "rings", waiting(all_reduce(11)))
    (tmp_path / "rings").mkdir()
    paths = report_files(f"{tmp_path}/reports/", "job", {})
    save_report(REPORT, paths, [HANG], monitor.look())
    assert json.loads((tmp_path / "reports" / "job.json").read_text()) == REPORT
    assert (tmp_path / "reports" / "job.txt").read_text().startswith("FAILED  missing rank  rank 1")


def test_metrics_are_prometheus_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each family has its help and type once, each line parses, and no series is there twice."""

    class Reader:
        def __init__(self, number: int) -> None:
            self.number, self.count = number, 5
            self.header = type("Header", (), {"job": 'a"b\\c'})

    row = live.GroupRow(Group("0", "default_pg", (0, 1)), {5: [0, 1]}, "all_reduce", {1: 2.5}, [0], [])
    monkeypatch.setattr(live, "group_rows", lambda readers: [row])
    monkeypatch.setattr(live, "pace_of", lambda readers: ([], Outlook(60, 0.5, 0.04, 40)))
    readers: Any = [Reader(0), Reader(1)]
    text = live.metrics_text(readers, 'a"b\\c', [HANG, HANG])
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(set(series)) == len(series)
    for one in series:
        assert re.fullmatch(r'distsim_\w+\{(\w+="(\\.|[^"\\\n])*",?)+\}', one), one
    helps = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(set(helps)) == len(helps)
    assert {name.partition("{")[0] for name in series} == set(helps)
    job = r'job="a\"b\\c"'
    assert f'distsim_wait_seconds{{{job},rank="1"}} 2.5' in text
    assert f'distsim_ranks{{{job},state="ended"}} 1' in text
    assert f"distsim_exit_code{{{job}}} 3" in text


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--events", "/nowhere/e"], "--events /nowhere/e: no folder /nowhere; create it first"),
        (["--events", "/"], "--events /: expected a file, got a folder"),
    ],
)
def test_events_that_cannot_be_written_are_refused(
    flags: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the work."""
    program = tmp_path / "p.py"
    program.write_text("")
    assert main(["run", "--on", "ethernet-cpu:1", *flags, str(program)]) == 2
    assert line in capsys.readouterr().err


def test_a_simulation_has_events_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A verdict and the end, in virtual time; a program that raises runs the command as well."""
    program = tmp_path / "p.py"
    program.write_text(
        "import torch.distributed as dist\ndist.init_process_group()\nif dist.get_rank(): dist.barrier()\n"
    )
    log = str(tmp_path / "e")
    run = [
        "run",
        "--on",
        "ethernet-cpu:1",
        "--quiet",
        "--events",
        log,
        "--on-verdict",
        f"cat > {tmp_path}/got",
        str(program),
    ]
    assert main(run) == 3
    verdict, finished = lines_of(tmp_path / "e")
    assert (verdict["event"], verdict["diagnosis"]["culprits"]) == ("verdict", [0])
    assert (finished["event"], finished["exit_code"]) == ("finished", 3)
    program.write_text("raise ValueError\n")
    assert main(run) == 1
    assert json.loads((tmp_path / "got").read_text())["exit_code"] == 1
