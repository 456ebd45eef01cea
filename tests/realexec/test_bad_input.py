"""Records that are damaged, strange or without room: one line each, the rest is diagnosed, the job goes on."""

from __future__ import annotations

import argparse
import json
import pickle
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import QuietMonitor, Zygote
from test_flight_recorder import dump, entry
from test_rings import issue, writer

from distsim.cli import diagnose, main, watch
from distsim.debug import postmortem
from distsim.debug.postmortem import examine, examine_jobs
from distsim.debug.records.kinds import Kind
from distsim.debug.report.news import save_report
from distsim.debug.rings import layout as rings
from distsim.debug.settings import Settings
from distsim.errors import UsageError
from tests.cases.corpus import SCENARIOS, Case
from tests.kin import one_in


def hang(folder: Path, job: str = "job", world: int = 2) -> list[Path]:
    """Two ranks, of which rank 1 never came to the last call."""
    paths = []
    for rank in range(2):
        ring = writer(folder, rank, world, job)
        ring.header(rings.W_JOINED, 1)
        for seq in range(1, 4):
            ring.finish(issue(ring, seq), rings.COMPLETED)
        if rank == 0:
            issue(ring, 4, rings.ISSUED | rings.WAITING)
        paths.append(ring.path)
    return paths


def overwrite(path: Path, start: int, junk: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[start : start + len(junk)] = junk
    path.write_bytes(data)


@pytest.mark.parametrize("seed", one_in(4, range(8)))
def test_flipped_bytes_are_no_traceback(seed: int, tmp_path: Path) -> None:
    """Whatever stands in a ring of the right version: a diagnosis or one line."""
    dice = random.Random(seed)
    good = [path.read_bytes() for path in hang(tmp_path)]
    parts = (16, rings.WORDS_AT, rings.RECORDS_AT, rings.TABLE_AT, rings.PAYLOAD_AT)
    for _ in range(12):
        for path, data in zip(sorted(tmp_path.glob("*.ring")), good, strict=True):
            path.write_bytes(data)
            for _ in range(dice.choice((1, 3, 20))):
                overwrite(path, dice.choice(parts) + dice.randrange(400), dice.randbytes(1))
        try:
            complaints = examine(tmp_path).complaints
        except UsageError as mistake:
            complaints = [str(mistake)]
        assert all("\n" not in line for line in complaints)


def test_a_ring_without_sense_is_left_out(tmp_path: Path) -> None:
    """One ring's tables are junk: its name is said, the other ranks are diagnosed."""
    hang(tmp_path, world=3)
    bad = writer(tmp_path, 2, 3)
    issue(bad, 1)
    at = rings.TABLE_AT + bad.group("0", "default_pg", [0, 1]) - 1
    length, _ = rings._ENTRY.unpack_from(bad.path.read_bytes(), at)
    overwrite(bad.path, at + rings._ENTRY.size, b"[1]".ljust(length))
    found = examine(tmp_path)
    assert any(line.startswith(bad.path.name) and "damaged, left out" in line for line in found.complaints)
    assert found.diagnoses[0].kind is Kind.MISSING_RANK


def test_a_rank_without_a_ring_left_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits, rank 1's ring is gone: it is the missing one, and nothing is said of how it spends its time."""
    monkeypatch.setattr(postmortem, "has_ended", lambda *_: True)  # nobody lives
    hang(tmp_path)[1].unlink()
    (first,) = examine(tmp_path).diagnoses
    assert (first.kind, first.culprits) == (Kind.MISSING_RANK, (1,))
    assert "Rank 1 left no record" in first.explanation
    assert "runs" not in first.explanation
    assert "spends" not in first.suggestion


@pytest.mark.parametrize("left", ["nothing", "junk"])
def test_done_but_for_a_rank_without_a_ring(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All is done in the rings that are there: inconclusive; healthy once the launcher saw the rank end well."""
    monkeypatch.setattr(postmortem, "has_ended", lambda *_: True)
    for rank in range(2):
        ring = writer(tmp_path, rank, 3)
        ring.header(rings.W_JOINED, 1)
        ring.header(rings.W_LIFE, rings.LIFE_EXITING)
        ring.finish(issue(ring, 1), rings.COMPLETED)
    if left == "junk":
        (tmp_path / "rank00002.a0.x.ring").write_bytes(b"junk")
    assert diagnose.run(argparse.Namespace(directory=tmp_path, report=None, sources=None, html=None)) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("INCONCLUSIVE nothing is wrong in the records of ranks 0,1, but rank 2 left none")
    assert "next: Read the log of rank 2" in out
    (tmp_path / "exit.00002.a0.json").write_text(json.dumps({"rank": 2, "attempt": 0, "code": 0}))
    assert diagnose.run(argparse.Namespace(directory=tmp_path, report=None, sources=None, html=None)) == 0
    assert capsys.readouterr().out.startswith("HEALTHY")


def test_a_world_too_large_is_damage(tmp_path: Path) -> None:
    """A size that no job has is not believed: nobody counts to four billion."""
    _, second = hang(tmp_path)
    header = list(rings.HEADER.unpack_from(second.read_bytes()))
    header[10] = (1 << 31) - 1
    overwrite(second, 0, rings.HEADER.pack(*header))
    assert any("damaged, it claims to be of rank 1 of" in line for line in examine(tmp_path).complaints)


JUNK: list[Any] = [None, -5, "x", [1], {"a": 1}, ["a"], [[None]], 10**30]


KEYS = ["input_sizes", "frames", "process_group", "profiling_name", "time_created_ns", "state"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("as_json", [False, True])
def test_entries_of_another_shape(key: str, as_json: bool, tmp_path: Path) -> None:
    """A dump whose entries hold something else is left out in one line; the others are diagnosed."""
    for junk in JUNK:
        for rank in range(3):
            entries = [entry(1), entry(2, state="scheduled")] if rank == 0 else [entry(1)]
            if rank == 2:
                entries[0][key] = junk
            said = dump(entries)
            (tmp_path / f"dump_{rank}").write_bytes(json.dumps(said).encode() if as_json else pickle.dumps(said))
        found = examine(tmp_path)
        assert found.diagnoses, junk
        assert all("\n" not in line for line in found.complaints)


def test_ranks_of_another_shape(tmp_path: Path) -> None:
    """A group whose ranks are no numbers costs that dump, not the diagnosis."""
    for rank in range(2):
        said = dump([entry(1), entry(2, state="scheduled")], "[0, 1]")
        if rank:
            said["pg_config"]["0"]["ranks"] = ["a"]
        (tmp_path / f"dump_{rank}").write_bytes(pickle.dumps(said))
    found = examine(tmp_path)
    assert any(line.startswith("dump_1: damaged, left out") for line in found.complaints)
    assert found.diagnoses[0].culprits == (1,)


def two_jobs(folder: Path) -> None:
    """Rank 1 of job `older` never came; in job `newer`, which began an hour later, all went well."""
    hang(folder, "older")
    for rank in range(3):
        ring = writer(folder, rank, 3, "newer")
        ring.header(rings.W_JOINED, 1)
        ring.header(rings.W_OPENED, ring.words[rings.WORDS_AT // 8 + rings.W_OPENED] + 3_600_000_000_000)
        ring.header(rings.W_BEAT, ring.words[rings.WORDS_AT // 8 + rings.W_BEAT] + 3_600_000_000_000)
        ring.header(rings.W_LIFE, rings.LIFE_EXITING)
        ring.finish(issue(ring, 1), rings.COMPLETED)


def test_another_jobs_verdict_is_not_ours(tmp_path: Path) -> None:
    """Two jobs left their rings in one folder, and one of them its verdict: each is judged by its own."""
    two_jobs(tmp_path)
    (older,) = (found for job, found in examine_jobs(tmp_path)[0] if job.name == "older")
    seen = [{**older.diagnoses[0].to_json(), "kind": "nan"}]
    said = {"schema": "distsim.report/1", "job": "older", "diagnoses": seen}
    (tmp_path / "verdict.json").write_text(json.dumps(said))
    kinds = {job.name: [d.kind for d in found.diagnoses] for job, found in examine_jobs(tmp_path)[0]}
    assert kinds == {"newer": [], "older": [Kind.NAN]}
    (tmp_path / "verdict.older.json").write_text(json.dumps(said))
    (tmp_path / "verdict.json").write_text(json.dumps({**said, "job": "newer", "diagnoses": []}))
    kinds = {job.name: [d.kind for d in found.diagnoses] for job, found in examine_jobs(tmp_path)[0]}
    assert kinds == {"newer": [], "older": [Kind.NAN]}


def test_exit_codes_are_of_the_launchers_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit codes are the oldest job's, whose launcher cleared the folder; `examine` says what `examine_jobs` says."""
    monkeypatch.setattr(postmortem, "has_ended", lambda *_: True)  # nobody lives
    two_jobs(tmp_path)
    (tmp_path / "exit.00001.a0.json").write_text(json.dumps({"rank": 1, "attempt": 0, "code": -9}))
    judged, _ = examine_jobs(tmp_path)
    seen = {job.name: [(d.kind, d.culprits) for d in found.diagnoses] for job, found in judged}
    assert seen == {"newer": [], "older": [(Kind.RANK_KILLED, (1,))]}
    newest = examine(tmp_path)
    assert newest.diagnoses == judged[0][1].diagnoses
    assert any("two jobs in one folder: 2 rings of job older left out" in line for line in newest.complaints)


def test_a_folder_that_no_rank_came_to(tmp_path: Path) -> None:
    """Only the launcher's and the monitor's files: one line that says so, not one a file."""
    for name in ("launcher.json", "monitor..lock", "ask.0", "answer.0", "exit.00000.a0.json", "interrupted.json"):
        (tmp_path / name).write_text("")
    with pytest.raises(UsageError, match="no rank has come to init_process_group") as said:
        examine(tmp_path)
    assert "answer" not in str(said.value)
    (tmp_path / "dump_0").write_bytes(b"junk")
    with pytest.raises(UsageError, match=r"\(dump_0: neither a pickle of plain data nor JSON[^;]*\)$"):
        examine(tmp_path)


def test_each_job_of_a_folder_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`diagnose` has a heading a job, the newest first; the report has all, the older one's hang is the exit code."""
    two_jobs(tmp_path)
    report = tmp_path.parent / "report.json"
    assert diagnose.run(argparse.Namespace(directory=tmp_path, report=str(report), sources=None, html=None)) == 3
    out = capsys.readouterr().out
    first, second = out.index("job newer (3 ranks, began "), out.index("job older (2 ranks, began ")
    assert first < second < out.index("missing rank")
    said = json.loads(report.read_text())
    assert [(job["job"], job["exit_code"], len(job["diagnoses"])) for job in said["jobs"]] == [
        ("newer", 0, 0),
        ("older", 3, 1),
    ]
    assert (said["exit_code"], said["diagnoses"]) == (3, said["jobs"][1]["diagnoses"])


def test_a_report_on_standard_output_is_alone_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program reads it; what is for people goes to standard error."""
    hang(tmp_path)
    assert diagnose.run(argparse.Namespace(directory=tmp_path, report="-", sources=None, html=None)) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out)["diagnoses"][0]["kind"] == "missing_rank"
    assert captured.err.startswith("HANG  missing rank")
    assert not Path("-").exists()


def test_one_job_has_no_heading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of one job reads as ever, and its report has no list of jobs."""
    hang(tmp_path)
    report = tmp_path.parent / "report.json"
    assert diagnose.run(argparse.Namespace(directory=tmp_path, report=str(report), sources=None, html=None)) == 3
    assert capsys.readouterr().out.startswith("HANG  missing rank")
    assert "jobs" not in json.loads(report.read_text())


@pytest.mark.parametrize(("said", "width"), [("60", 60), ("", 110), ("wide", 110), ("0", 110)])
def test_columns_holds_where_there_is_no_terminal(
    said: str, width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piped, the report is as wide as COLUMNS says, else 110 columns."""
    hang(tmp_path)
    monkeypatch.setenv("COLUMNS", said)
    diagnose.run(argparse.Namespace(directory=tmp_path, report=None, sources=None, html=None))
    widest = max(len(line) for line in capsys.readouterr().out.splitlines())
    assert width - 20 < widest <= width


def test_watch_says_which_job_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two jobs the newer is shown, in a line how to see the other; a name that is not there is one line, too."""
    two_jobs(tmp_path)
    assert watch.run(argparse.Namespace(directory=tmp_path, job="", interval=1.0, html=None, metrics=None)) == 0
    shown = capsys.readouterr()
    assert "#1: 0, 1" in shown.out
    (line,) = shown.err.splitlines()
    assert line.startswith("distsim: 2 jobs in one folder, this is job newer (3 ranks, began ")
    assert line.endswith("; --job older shows another")
    assert watch.run(argparse.Namespace(directory=tmp_path, job="older", interval=1.0, html=None, metrics=None)) == 0
    shown = capsys.readouterr()
    assert "#4: 0 " in shown.out
    assert "this is job older (2 ranks" in shown.err
    with pytest.raises(UsageError, match="no job oldest here; there are newer, older"):
        watch.run(argparse.Namespace(directory=tmp_path, job="oldest", interval=1.0, html=None, metrics=None))


def test_exits_of_another_shape(tmp_path: Path) -> None:
    """Exit files that are none are passed over."""
    hang(tmp_path)
    for number, text in enumerate(("[1]", "null", '{"rank": "x", "attempt": 0, "code": 1}')):
        (tmp_path / f"exit.{number}.json").write_text(text)
    assert examine(tmp_path).diagnoses[0].culprits == (1,)


def test_a_folder_taken_away_after_a_good_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No word about a report in a folder that is gone, nor about one that nobody can miss; else, there is one."""
    gone = tmp_path / "gone" / "verdict.json"
    save_report({"diagnoses": [], "exit_code": 0}, [str(gone)])
    save_report({"diagnoses": [], "exit_code": 3}, [str(gone)])
    assert capsys.readouterr().err == ""
    (tmp_path / "verdict.json").mkdir()
    save_report({"diagnoses": [], "exit_code": 3}, [str(tmp_path / "verdict.json")])
    assert "no report in" in capsys.readouterr().err


def test_an_abort_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be written any more, the ranks are ended all the same."""
    monitor = QuietMonitor(tmp_path / "gone", Settings(), None)
    sent: list[int] = []
    monkeypatch.setattr("distsim.debug.monitor.ends.kill", lambda host, number, but=(): sent.append(number))
    monitor.abort()
    assert sent == [signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
def test_py_spy_is_not_permitted(
    there: bool, zygote: Zygote, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped rank's stack cannot be read: one line says why, and the rank is named all the same."""
    tool = tmp_path / "py-spy"
    if there:
        tool.write_text("#!/bin/sh\necho 'Error: Permission denied' >&2\nexit 1\n")
        tool.chmod(0o755)
    monkeypatch.setattr("distsim.debug.evidence.processes.sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    result = zygote.run(Case.named("ends/process_frozen").path, 3, directory=folder, hang_after_s=2.0)
    assert (result.diagnoses[0].kind, result.diagnoses[0].culprits) == (Kind.PROCESS_FROZEN, (1,))
    said = [line for line in result.report.splitlines() if line.startswith("distsim: no stack of rank 1")]
    assert len(said) == 1, result.report
    assert ("py-spy failed (Error: Permission denied)" if there else "is not installed") in said[0]


@pytest.mark.slow
def test_a_strange_ring_beside_a_live_job(zygote: Zygote, folder: Path) -> None:
    """A ring of another version in a live job's folder is said in one line; the job is watched as ever."""
    (folder / "rank00001.a0.old.ring").write_bytes(b"DISTRING" + bytes(1000))
    result = zygote.run(SCENARIOS / "hangs" / "wrong_tag.py", 2, directory=folder)
    assert result.diagnoses[0].kind is Kind.P2P_UNMATCHED
    assert result.report.count("distsim: rank00001.a0.old.ring: ") == 1


@pytest.mark.slow
def test_diagnose_says_each_in_a_line(zygote: Zygote, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`distsim diagnose` on a folder with a hang and five things that are wrong."""
    zygote.run(Case.named("circles/p2p_opposite").path, 2, directory=folder)
    good = next(folder.glob("rank00000*.ring")).read_bytes()
    (folder / "rank00005.a0.x.ring").write_bytes(good[:5000])
    (folder / "rank00006.a0.x.ring").write_bytes(good[:8] + b"\x63" + good[9:])
    (folder / "rank00007.a0.x.ring").write_bytes(b"something else")
    assert main(["diagnose", str(folder)]) == 3
    said = capsys.readouterr()
    assert "deadlock cycle" in said.out
    assert len(said.err.splitlines()) == 3, said.err
    assert "Traceback" not in said.err
