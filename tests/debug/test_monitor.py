"""What the monitor knows by itself: who has started the job, what it has told and takes back, when it was away."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.evidence.processes import own_process
from distsim.debug.monitor.__main__ import MOST_FAULTS, Steady
from distsim.debug.monitor.ends import ORPHANS_S
from distsim.debug.monitor.host import Host, SuspensionDetector
from distsim.debug.monitor.job_report import JobReport
from distsim.debug.monitor.loop import RAISE_S, Monitor
from distsim.debug.monitor.peers import PeerSession
from distsim.debug.records import Evidence
from distsim.debug.records.diagnosis import diagnoses_to_json
from distsim.debug.records.kinds import Kind, Proof
from distsim.debug.report.news import came, is_late, went_on
from distsim.debug.rings.files import ring_path, write_private
from distsim.debug.rings.layout import W_JOINED
from distsim.debug.rings.writer import RingWriter
from distsim.debug.settings import Settings
from tests.debug.builders import Step, all_reduce, finding, frozen, killed, play, run

NOBODY = 2**22 + 1
"""Above the kernel's largest process number."""


@pytest.mark.parametrize(
    ("said", "there"),
    [
        (own_process(), True),
        ({**own_process(), "start": own_process()["start"] + 1}, False),
        ({"pid": os.getpid()}, True),
        ({"pid": NOBODY}, False),
        ({}, True),
        (7, False),
    ],
)
def test_a_launcher_is_there_as_long_as_its_process_lives(tmp_path: Path, said: Any, there: bool) -> None:
    """Its start tells it from a later process of the same number; without it, the number has to do."""
    (tmp_path / "launcher.json").write_text(json.dumps(said))
    assert Monitor(tmp_path, Settings.read({}), None)._launched() is there


@pytest.mark.parametrize("level", ["record", "check"])
def test_calls_that_all_have_made_are_forgotten(tmp_path: Path, level: str) -> None:
    """At level record, too, where nobody wants to know of their differences: that would be the whole job."""
    monitor = Monitor(tmp_path, Settings.read({"level": level}), None)
    comparer = monitor.host.comparer
    for rank in (0, 1):
        comparer.feed_rows(rank, ("0", (0, 1), 0), np.array([[1, 2, 3], [2, 2, 3]], dtype=np.uint64))
    monitor._compare()
    assert [done for _, done in comparer.progress()] == [2]
    assert not any(group.waiting for group in comparer._groups.values())


class Watching(Monitor):
    """A monitor whose looks are given, and that says and ends nothing."""

    def __init__(self, folder: Path, *looks: Evidence) -> None:
        super().__init__(folder, Settings.read({"on_hang": "abort", "directory": str(folder)}), None)
        self.looks = list(looks)
        self.said: list[str] = []
        self.ended = 0
        self.report.say = self.said.append  # type: ignore[method-assign]
        self.report.print_diagnoses = self._print  # type: ignore[method-assign]

    def look(self, stacks: bool = False, focus: Any = None) -> Evidence:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def _print(self, new: Any, evidence: Evidence) -> None:
        self.said += [f"{d.kind} {d.provisional}" for d in new]

    def abort(self) -> None:
        self.ended += 1
        self.aborted = True


def waiting(last: Step, waited_s: float = 5.0) -> Evidence:
    """Rank 0 ends in *last*, rank 1 waits for it; patience lasts a minute."""
    evidence = play(2, {0: [last], 1: [all_reduce(11)]}, hang_after_s=60.0)
    evidence.now_s = waited_s
    return evidence


@pytest.mark.parametrize(
    ("on_hang", "launcher", "said"),
    [("report", None, True), ("report", own_process(), False), ("wait", None, False), ("abort", None, False)],
)
def test_a_job_that_is_left_alone_is_said_to_be(tmp_path: Path, on_hang: str, launcher: Any, said: bool) -> None:
    """Under another launcher the last line is how to end such a job and where its records are."""
    if launcher is not None:
        (tmp_path / "launcher.json").write_text(json.dumps(launcher))
    evidence = play(2, lambda r: [all_reduce(11, shape=(4 + r,))])
    monitor = Watching(tmp_path, evidence)
    monitor.settings = Settings.read({"on_hang": on_hang, "directory": str(tmp_path)}, {})
    monitor.tell(diagnose(evidence), evidence)
    last = monitor.said[-1]
    assert ("DISTSIM_ON_HANG=abort ends such a job" in last and last.endswith(f"diagnose {tmp_path}")) == said
    assert monitor.ended == (on_hang == "abort")


def test_a_warning_is_withdrawn_when_it_went_on(tmp_path: Path) -> None:
    """One line takes it back, the report is empty, and what comes back later is told again."""
    stopped, goes_on = waiting(frozen(10)), play(2, lambda r: [all_reduce(11)], hang_after_s=60.0)
    monitor = Watching(tmp_path, stopped, stopped, goes_on)
    monitor.tell(diagnose(stopped), stopped)
    monitor.tell(diagnose(stopped), stopped)
    assert (monitor.said, monitor.report.exit_code, monitor.ended) == (["process_frozen True"], 0, 0)
    assert json.loads((tmp_path / "verdict.json").read_text())["diagnoses"][0]["provisional"] is True
    monitor._withdraw(at_the_end=True)
    monitor._withdraw(at_the_end=True)
    assert len(monitor.report.diagnoses) == 1
    monitor._withdraw(at_the_end=True)
    assert monitor.said[1:] == [
        "Rank 0 continued: the warning (process frozen, all_reduce #1) is withdrawn",
    ]
    assert monitor.report.diagnoses == []
    assert json.loads((tmp_path / "verdict.json").read_text())["diagnoses"] == []
    monitor.tell(diagnose(stopped), stopped)
    assert monitor.said[-1] == "process_frozen True"


@pytest.mark.parametrize("turn", ["_turn", "_farewell"])
def test_a_monitor_that_does_not_judge_withdraws_its_own_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: str
) -> None:
    """It waits for the monitors of other hosts when the late ranks have joined, and until the job has ended."""
    late = waiting(run(10))
    (call,) = late.records[1]
    call.op = "init_process_group"
    late.records = {**late.records, 0: []}
    late.straggler_after_s = 2.0
    (warning,) = diagnose(late)
    met = play(2, lambda r: [all_reduce(11)], hang_after_s=60.0)
    met.records[1][0].op, met.records[1][0].issued_s, met.records[1][0].completed_s = call.op, 1.0, 31.0
    monitor = Watching(tmp_path, met)
    monitor.tell([warning], late)
    monkeypatch.setattr(monitor.together, "judges", lambda host: False)
    getattr(monitor, turn)()
    assert monitor.said[-1] == (
        "Rank 0 joined after 30.0 s: the warning (never joined, init_process_group #1) is withdrawn"
    )
    assert json.loads((tmp_path / "verdict.json").read_text())["diagnoses"] == []


def test_the_warning_of_a_monitor_that_was_alone_is_withdrawn_by_its_leader(tmp_path: Path) -> None:
    """The first report of the leader has nothing of it: one line says so. What the leader says, it withdraws itself."""
    stopped = waiting(frozen(10))
    monitor = Watching(tmp_path, stopped)
    (warning,) = diagnose(stopped)
    monitor.tell([warning], stopped)
    empty, same = diagnoses_to_json([]), diagnoses_to_json([warning])
    monitor.accept(empty)
    assert monitor.said[1:] == ["Rank 0 continued: the warning (process frozen, all_reduce #1) is withdrawn"]
    monitor.accept(same)
    monitor.accept(empty)
    assert len(monitor.said) == 2


def test_a_warning_becomes_a_verdict_when_patience_is_over(tmp_path: Path) -> None:
    """It is told once more, with its exit code, in the place of the warning, and ends the job."""
    early, late = waiting(frozen(10)), waiting(frozen(10), 61.0)
    monitor = Watching(tmp_path, late)
    monitor.tell(diagnose(early), early)
    monitor.tell(diagnose(late), late)
    assert (monitor.said, monitor.ended) == (["process_frozen True", "process_frozen False"], 1)
    assert [(d.kind, d.exit_code) for d in monitor.report.diagnoses] == [(Kind.PROCESS_FROZEN, 3)]


def test_what_a_guard_saw_is_told_and_ends_nothing(tmp_path: Path) -> None:
    """NaN has an exit code; the job may know what to do with it."""
    evidence = play(2, lambda r: [all_reduce(11)], hang_after_s=60.0)
    evidence.findings = [finding(Kind.NAN, 1, text="NaN", call=evidence.records[1][0])]
    monitor = Watching(tmp_path, evidence)
    monitor.tell(diagnose(evidence), evidence)
    assert (monitor.report.exit_code, monitor.ended) == (1, 0)


def test_a_nap_that_lasts_too_long_is_the_monitors_own(tmp_path: Path) -> None:
    """What it did not see counts for nobody's wait, and it judges a little later."""
    host = Host(tmp_path, None)
    began_ns = time.monotonic_ns() - int(30e9)
    assert host.away.look() == 0
    host.away._last_ns = began_ns
    assert host.away.look() == 1
    known = host.knowledge(Settings())
    now_ns = time.monotonic_ns()
    assert known.watched_ns(began_ns - int(5e9), now_ns) < 6e9
    assert known.watched_ns(now_ns - int(1e9), now_ns) <= 1e9
    monitor = Watching(tmp_path, waiting(frozen(10)))
    monitor._first_death = 1.0
    monitor._back(now := time.monotonic())
    assert monitor._first_death is None
    due = monitor._next_judgement
    assert due > now
    monitor._back(now + 1.5)
    assert monitor._next_judgement == due, "on a host that is always too busy it judges at last"


def test_only_who_did_not_run_was_away() -> None:
    """A judgement of half a minute, beside which the thread naps on, is no absence; a stop of both is one, whoever
    looks first afterwards."""
    now_s = [0.0]
    away = SuspensionDetector(lambda: int(now_s[0] * 1e9))
    for _ in range(300):  # the monitor judges; its thread alone looks
        now_s[0] += 0.1
        away.look()
    assert away.look() == 0
    now_s[0] += 20.0  # SIGSTOP
    assert [away.look(), away.look()] == [1, 1]
    assert away.spans_ns == [(int(30.0 * 1e9), int(50.0 * 1e9))]


def test_a_long_judgement_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took as long as an absence would; its thread has run meanwhile, so it stands."""
    evidence = waiting(killed())
    monitor = Watching(tmp_path, evidence)
    now_s = [100.0]
    monitor.host.away = SuspensionDetector(lambda: int(now_s[0] * 1e9))

    def judged(_evidence: Any) -> Any:
        for _ in range(40):
            now_s[0] += 0.1
            monitor.host.away.look()
        return diagnose(evidence)

    monkeypatch.setattr(monitor, "_judgement", judged)
    monkeypatch.setattr(monitor.host, "oldest_wait_s", lambda: 60.0)
    monitor._still_since = 0.0
    monitor._judge(0)
    assert [d.kind for d in monitor.report.diagnoses] == [Kind.RANK_KILLED]


def rank(folder: Path, number: int = 0) -> RingWriter:
    """The ring of a rank that lives: this process."""
    path = ring_path(folder, number, 0, "job")
    return RingWriter(path, rank=number, world_size=2, local_rank=number, job="job", attempt=0)


def test_strict_has_time_to_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that do not fit and that strict holds are no proof before it had time to raise; elsewhere they are."""
    clock = [100.0]
    monkeypatch.setattr("distsim.debug.monitor.loop.time", SimpleNamespace(monotonic=lambda: clock[0]))
    evidence = play(2, lambda r: [all_reduce(10, shape=(4 + r,))])
    found = [replace(one, proof=Proof.MET) for one in diagnose(evidence)]
    early = {}
    for level in ("strict", "check"):
        monitor = Monitor(tmp_path, Settings.read({"level": level}, {}), None)
        seen = [monitor._premature(found, evidence)]
        clock[0] += RAISE_S + 0.1
        early[level] = [*seen, monitor._premature(found, evidence)]
    assert early == {"strict": [True, False], "check": [False, False]}


def test_a_monitor_that_gives_up_leaves_the_rings_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but faults of its own: the job is not called healthy, and what its ranks have noted stays."""
    monkeypatch.setattr("distsim.debug.monitor.__main__.time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr("distsim.debug.monitor.loop.default_bases", lambda: (tmp_path,))
    folder = tmp_path / "job"  # one that we chose ourselves: a healthy job's goes
    folder.mkdir()
    rank(folder)
    monitor = Steady(folder, Settings.read({}, {}), "job")
    monkeypatch.setattr(monitor.host, "read", lambda together: 1 / 0)
    assert monitor.run() == 0
    said = json.loads((folder / "verdict.json").read_text())
    assert "internal errors" in said["inconclusive"]
    assert said["diagnoses"] == []
    assert list(folder.glob("rank*.ring"))
    assert (folder / "monitor.err").read_text().count("ZeroDivisionError: ") == MOST_FAULTS + 1
    assert "continues without the guard" in capsys.readouterr().err
    napping = [thread for thread in threading.enumerate() if thread.name == "distsim-away"]
    for thread in napping:
        thread.join(10)
    assert not any(thread.is_alive() for thread in napping), "a monitor that is over looks at no clock any more"


def test_rings_removed_unseen_accuse_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing will ever be known of a rank whose ring was taken away before it was mapped: that it is missing in a call
    is no hang, and one line says that none will be told."""
    rings = [rank(tmp_path, number) for number in (0, 1)]
    ring_of_1 = next(path for path in tmp_path.glob("rank00001*.ring"))
    ring_of_1.unlink()
    monitor = Monitor(tmp_path, Settings.read({}, {}), None)
    monitor.host.find()
    monitor._miss_rings()
    assert not monitor.report.inconclusive  # it may still come
    for path in tmp_path.glob("rank*.ring"):
        path.unlink()
    for _ in range(2):
        monitor._miss_rings()
    assert monitor._judgement(waiting(frozen(10))) == []
    assert capsys.readouterr().err.count("the job continues without the guard, hangs are not reported") == 1
    for ring in rings:
        ring.close()


def test_a_good_turn_ends_a_row_of_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault now and then over a long job is no reason to give up."""
    monkeypatch.setattr("distsim.debug.monitor.__main__.time", SimpleNamespace(sleep=lambda seconds: None))
    monitor = Steady(tmp_path, Settings.read({}, {}), None)
    turns = iter([False, True] * (2 * MOST_FAULTS))

    def find(elsewhere: Any = ()) -> None:
        if not next(turns):
            raise ValueError("a fault")

    monkeypatch.setattr(monitor.host, "find", find)
    assert not any(monitor._turn() for _ in range(4 * MOST_FAULTS))
    assert monitor.faults == 0


@pytest.mark.parametrize("joined", [False, True])
def test_a_killed_launcher_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], joined: bool
) -> None:
    """Said once. Ranks that still wait for each other in its store can never meet: they are ended after a while, where
    a hang is to end the job; ranks that have met run on."""
    write_private(tmp_path / "launcher.json", json.dumps({**own_process(), "pid": NOBODY}))
    rings = [rank(tmp_path, number) for number in (0, 1)]
    if joined:
        rings[0].header(W_JOINED, 1)
    monitor = Monitor(tmp_path, Settings.read({"on_hang": "abort"}, {}), None)
    clock = [1000.0]
    aborted: list[float] = []

    def abort() -> None:
        monitor.aborted = True
        aborted.append(clock[0])

    monkeypatch.setattr(monitor, "abort", abort)
    monkeypatch.setattr("distsim.debug.monitor.ends.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monitor.host.find()
    for _ in range(4):
        monitor._orphans.step(monitor)
        clock[0] += ORPHANS_S * 0.6
    said = capsys.readouterr().err
    assert said.count("the launcher has ended") == 1
    assert (f"(kill {os.getpid()} ends them)" in said) is joined
    assert ("continue" in said, aborted) == ((True, []) if joined else (False, [1000.0 + 2 * ORPHANS_S * 0.6]))
    (tmp_path / "done.json").write_text("{}")
    assert not monitor._orphans.launcher_died()


@pytest.mark.parametrize(("columns", "lines"), [(80, 2), (0, 1)])
def test_what_a_monitor_says_is_wrapped_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, lines: int
) -> None:
    """The line that withdraws a warning is as wide as the report before it; in a log it is one."""
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    monkeypatch.setattr("sys.stderr.fileno", lambda: 2)
    (warning,) = diagnose(waiting(frozen(10)))
    JobReport.say(went_on(warning))
    told = capsys.readouterr().err.splitlines()
    assert len(told) == lines
    assert all(len(line) <= (columns or 999) for line in told)
    assert " ".join(line.strip() for line in told).endswith("is withdrawn")


@pytest.mark.parametrize("said", ["", "{", "{}", "[]", '{"address": "a", "port": "x", "secret": ""}', '{"port": 3}'])
def test_a_half_written_introduction_is_read_again(tmp_path: Path, said: str) -> None:
    """It is no fault of the monitor's: the next turn finds the whole."""
    (tmp_path / "follow.json").write_text(said)
    together = PeerSession(tmp_path)
    together._choose(Monitor(tmp_path, Settings.read({}, {}), None))
    assert together.follower is None


def test_a_rank_that_was_late_is_said_to_have_come(tmp_path: Path) -> None:
    """The warning stays in the report and is of the past: how long it took, and nobody is stuck."""
    late = waiting(run(10), 15.0)
    late.straggler_after_s = 10.0
    after = play(2, lambda r: [all_reduce(11)], hang_after_s=60.0)
    after.records[0][0].issued_s, after.records[1][0].issued_s = 22.0, 1.0
    monitor = Watching(tmp_path, late, after)
    monitor.tell(diagnose(late), late)
    monitor._withdraw(at_the_end=True)
    assert "came_after_s" not in json.loads((tmp_path / "verdict.json").read_text())["diagnoses"][0]
    monitor._withdraw(at_the_end=True)
    (entry,) = json.loads((tmp_path / "verdict.json").read_text())["diagnoses"]
    assert (entry["kind"], entry["culprits"], entry["came_after_s"], entry["stuck"]) == ("straggler", [0], 21.0, {})
    assert "was late for all_reduce #1" in entry["explanation"]
    assert "came after 21.0 s. Rank 1 waited at train.py:11." in entry["explanation"]
    assert "still runs" not in entry["explanation"]
    assert monitor.said[1:] == ["Rank 0 came after 21.0 s: the warning (straggler, all_reduce #1) is withdrawn"]


def test_a_rank_that_has_not_made_the_call_is_not_said_to_have_come() -> None:
    """Its warning may have ended because something worse is told of it now."""
    late = waiting(run(10), 15.0)
    late.straggler_after_s = 10.0
    (warning,) = diagnose(late)
    assert is_late(warning)
    assert came(warning, late) is warning
