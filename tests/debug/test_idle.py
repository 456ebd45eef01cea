"""Jobs in which no rank waits in a call: stuck, each rank on its own host, or computing for long."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.evidence import processes
from distsim.debug.monitor import host as monitor_host
from distsim.debug.monitor.host import ActivityWatch
from distsim.debug.records import Evidence, Phase, RankState
from distsim.debug.records.kinds import Kind
from distsim.debug.report.rank_states import where_ranks_were
from tests.debug.builders import FILE, all_reduce, finish, host, play, run


def quiet_job(idle_s: tuple[float | None, ...], quiet_s: float = 100.0, **states: Any) -> Evidence:
    """Every rank has made one call and is at line 12; rank i has been idle for `idle_s[i]`."""
    evidence = play(len(idle_s), lambda rank: [all_reduce(11), run(12)], hang_after_s=60.0)
    evidence.now_s = max(call.completed_s or 0.0 for calls in evidence.records.values() for call in calls) + quiet_s
    for rank, seconds in enumerate(idle_s):
        evidence.ranks[rank].idle_s = seconds
        for name, value in states.items():
            setattr(evidence.ranks[rank], name, value)
    return evidence


def test_a_job_that_stands_still_is_a_warning_then_a_hang() -> None:
    """All ranks idle: a warning after some seconds, which ends nothing, and a hang when --hang-after is over."""
    (warning,) = diagnose(quiet_job((8.0, 9.0), quiet_s=9.0))
    assert (warning.kind, warning.culprits, warning.provisional) == (Kind.HOST_STUCK, (0, 1), True)
    assert "none has moved for 8 s: ranks 0,1 are at train.py:12" in warning.explanation
    (hang,) = diagnose(quiet_job((61.0, 99.0)))
    assert (hang.kind, hang.exit_code, hang.ends_job) == (Kind.HOST_STUCK, 3, True)


def test_ranks_that_compute_are_only_a_warning() -> None:
    """Nobody waits for them, so what they compute may take as long as it likes; after --hang-after it is said."""
    assert diagnose(quiet_job((99.0, 0.5), quiet_s=59.0)) == []
    (warning,) = diagnose(quiet_job((99.0, 0.5)))
    assert (warning.provisional, warning.ends_job, warning.exit_code) == (True, False, 0)
    assert "They still compute" in warning.explanation


def test_ranks_that_compute_longer_than_the_user_allows_are_a_hang() -> None:
    """--hang-after that was set is the user's word: after that long without any call; the report calls it no proof."""
    evidence = quiet_job((0.5, 0.5))
    evidence.quiet_after_s = 60.0
    (hang,) = diagnose(evidence)
    assert (hang.kind, hang.culprits, hang.exit_code, hang.ends_job) == (Kind.HOST_STUCK, (0, 1), 3, True)
    assert "They still compute. This is not proof" in hang.explanation
    assert "--hang-after" in hang.suggestion


@pytest.mark.parametrize("idle_s", [58.0, 6.0])
def test_ranks_that_sleep_when_the_limit_is_over_are_not_said_to_compute(idle_s: float) -> None:
    """They fell asleep after their last call, and have slept for a little less than the limit."""
    evidence = quiet_job((idle_s, 59.0), quiet_s=61.0)
    evidence.quiet_after_s = 60.0
    (hang,) = diagnose(evidence)
    assert (hang.culprits, hang.exit_code, hang.ends_job) == ((0, 1), 3, True)
    assert f"No rank has made a call for 61 s, and none waits in one; none has moved for {idle_s:.0f} s" in (
        hang.explanation
    )
    assert "compute" not in hang.explanation
    assert "a queue, a lock" in hang.suggestion
    assert "--hang-after" not in hang.suggestion


@pytest.mark.parametrize(("asleep_s", "compute"), [((30.0, 31.0), False), ((30.0, 0.0), True), ((30.0, None), True)])
def test_a_rank_computes_only_where_the_thread_that_makes_its_calls_does(
    asleep_s: tuple[float | None, ...], compute: bool
) -> None:
    """A helper thread or child process that works is said to; the job is a hang by the limit either way."""
    evidence = quiet_job((0.5, 0.5))
    evidence.quiet_after_s = 60.0
    for rank, seconds in enumerate(asleep_s):
        evidence.ranks[rank].asleep_s = seconds
    (hang,) = diagnose(evidence)
    assert hang.ends_job
    assert ("They still compute" in hang.explanation) is compute
    assert ("Their main threads sleep" in hang.explanation) is not compute


@pytest.mark.parametrize("owes_no_call", [{"joining": True}, {"phase": Phase.FINISHED, "idle_s": None}])
def test_a_rank_that_nobody_can_wait_for_is_no_hang(owes_no_call: dict[str, Any]) -> None:
    """It is alone in its group, where the other rank has ended, or no rank has ever joined one."""
    evidence = quiet_job((0.5, 0.5))
    evidence.quiet_after_s = 60.0
    for rank, state in evidence.ranks.items():
        if rank or "joining" in owes_no_call:
            for name, value in owes_no_call.items():
                setattr(state, name, value)
    assert not any(d.ends_job for d in diagnose(evidence))


def test_ranks_that_have_destroyed_their_group_may_compute_on() -> None:
    """No call is to be expected of them: an evaluation, an upload after the training."""
    evidence = quiet_job((0.5, 0.5), left_group=True)
    evidence.quiet_after_s = 60.0
    assert diagnose(evidence) == []
    evidence.ranks[1].left_group = False
    (hang,) = diagnose(evidence)
    assert hang.culprits == (1,)


@pytest.mark.parametrize("idle_s", [(None, 90.0), (1.0, 90.0)])
def test_a_job_is_idle_only_when_all_its_ranks_are(idle_s: tuple[float | None, ...]) -> None:
    """A rank that moves, or that nobody watches, may come to its next call."""
    assert diagnose(quiet_job(idle_s, quiet_s=30.0)) == []


def test_a_call_that_holds_the_gil_counts_as_standing_still() -> None:
    """It may compute: no thread of the rank can run beside it, the heartbeat included."""
    (hang,) = diagnose(quiet_job((0.0, 0.0), silent_s=61.0))
    assert hang.ends_job
    assert "in a call that holds the GIL" in hang.explanation


def test_a_rank_that_waits_for_another_is_not_idle() -> None:
    """Then the wait decides, and the rank that is waited for."""
    evidence = play(2, {0: [all_reduce(11)], 1: [run(12)]}, hang_after_s=60.0)
    evidence.now_s = 9.0
    for state in evidence.ranks.values():
        state.idle_s = 9.0
    assert all(d.victims for d in diagnose(evidence))


def test_ranks_that_have_not_begun_never_joined() -> None:
    """Before their first call ranks that stand still have not come to init_process_group."""
    evidence = quiet_job((61.0, 61.0), joining=True)
    evidence.records = {}
    (hang,) = diagnose(evidence)
    assert (hang.kind, hang.culprits, hang.ends_job) == (Kind.NEVER_JOINED, (0, 1), True)


def test_ranks_that_have_finished_do_not_hide_one_that_stands_still() -> None:
    """The job is not over before all have ended."""
    evidence = quiet_job((61.0, None))
    evidence.ranks[1] = play(2, {0: [], 1: [finish()]}).ranks[1]
    (hang,) = diagnose(evidence)
    assert (hang.culprits, hang.ends_job) == ((0,), True)


def test_simulated_ranks_stuck_alike_are_one_diagnosis() -> None:
    """As on gloo: one report with all of them, not one a rank."""
    (hang,) = diagnose(play(3, lambda rank: [host("queue.get", 9)]))
    assert (hang.kind, hang.culprits) == (Kind.HOST_STUCK, (0, 1, 2))


def meeting_by_hand(idle_s: float, limit_s: float | None) -> Evidence:
    """Ranks 0 and 1 make a world of five by hand; of ranks 2 to 4 no process is known."""
    evidence = quiet_job((idle_s, idle_s), quiet_s=idle_s + 1.0)
    evidence.quiet_after_s = limit_s
    evidence.ranks = {**evidence.ranks, **{rank: RankState(rank) for rank in (2, 3, 4)}}
    evidence.world_size, evidence.unseen = 5, frozenset({2, 3, 4})
    evidence.processes = {rank: f"rank {rank} of 5 at host:5, of which no records are here" for rank in (2, 3, 4)}
    evidence.sources = {FILE: "\n" * 10 + "if name in words:\n    rendezvous()\n"}
    evidence.ranks[0].meets_by_hand, evidence.ranks[1].meets_by_hand = "host:5", "host:5 big"
    evidence.ranks[0].idle_s, evidence.ranks[0].asleep_s = 0.0, idle_s  # its store answers
    return evidence


def test_ranks_that_wait_by_hand_for_ranks_that_were_never_started_are_named() -> None:
    """A warning names the missing ranks and the store; a hang when the user's limit is over."""
    (warning,) = diagnose(meeting_by_hand(8.0, 60.0))
    assert (warning.kind, warning.culprits, warning.provisional) == (Kind.NEVER_JOINED, (2, 3, 4), True)
    assert "Ranks 2-4 have not come to the rendezvous at host:5" in warning.explanation
    assert "counts as a hang after 60 s" in warning.explanation
    for idle_s in (59.5, 61.0):
        (hang,) = diagnose(meeting_by_hand(idle_s, 60.0))
        assert (hang.kind, hang.culprits, hang.exit_code, hang.ends_job) == (Kind.NEVER_JOINED, (2, 3, 4), 3, True)
        assert sorted(hang.stuck) == [0, 1]
        assert hang.suggestion.startswith("Start the missing ranks")
        assert hang.suggestion.endswith("reaches the master.")


def test_processes_that_are_not_watched_may_come_to_a_rendezvous_by_hand_at_any_time() -> None:
    """Inference engines may load for longer than the default: without a limit of the user's the job is left alone."""
    (warning,) = diagnose(meeting_by_hand(99.0, None))
    assert (warning.provisional, warning.ends_job) == (True, False)
    assert "set --hang-after" in warning.explanation


def test_an_interrupt_says_nothing_of_the_calls_of_ranks_that_are_not_watched() -> None:
    """They may have made any number of calls: nobody has seen them."""
    *_, last = where_ranks_were(meeting_by_hand(8.0, None))
    assert last == "Ranks 2-4 left no record here."


class Ring:
    """What `ActivityWatch` reads of a rank."""

    header = SimpleNamespace(pid=1)

    def __init__(self) -> None:
        self.count = 7
        self.place = "train.py:12"

    def position(self) -> str:
        return self.place


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock and a process's work, both set by the test."""
    now = SimpleNamespace(s=1000.0, work=processes.Work(0.0, 0))
    monkeypatch.setattr(monitor_host.time, "monotonic_ns", lambda: int(now.s * 1e9))
    monkeypatch.setattr(monitor_host, "work_of", lambda pid: now.work)
    return now


@pytest.mark.parametrize("sign", ["call", "position", "cpu", "transfer", None])
def test_any_sign_of_progress_ends_idleness(clock: SimpleNamespace, sign: str | None) -> None:
    """A call, a move of the main thread, CPU time, bytes; the CPU time of a heartbeat is none."""
    ring, watch = Ring(), ActivityWatch()
    for _ in range(10):
        watch.step({0: ring})  # type: ignore[dict-item]
        clock.s += 1.1
        clock.work = processes.Work(clock.work.cpu_s + 0.01, 0)
    idle_s = clock.s - watch.idle_since_ns()[0] / 1e9
    assert idle_s > 8.0
    ring.count += sign == "call"
    ring.place += "0" * (sign == "position")
    clock.work = processes.Work(clock.work.cpu_s + 0.5 * (sign == "cpu"), 512 * (sign == "transfer"))
    watch.step({0: ring})  # type: ignore[dict-item]
    assert clock.s - watch.idle_since_ns()[0] / 1e9 == pytest.approx(0.0 if sign else idle_s, abs=0.01)


def test_a_main_thread_sleeps_while_other_threads_work(clock: SimpleNamespace) -> None:
    """Their CPU time keeps the rank from being idle, and leaves its main thread asleep; its own wakes it."""
    ring, watch = Ring(), ActivityWatch()

    def step(main_s: float) -> tuple[float, float]:
        clock.s += 1.1
        clock.work = processes.Work(clock.work.cpu_s + 0.5, 0, clock.work.main_cpu_s + main_s)
        watch.step({0: ring})  # type: ignore[dict-item]
        return clock.s - watch.idle_since_ns()[0] / 1e9, clock.s - watch.asleep_since_ns()[0] / 1e9

    for _ in range(5):
        idle_s, asleep_s = step(0.0)
    assert (idle_s, asleep_s) == (pytest.approx(0.0, abs=0.01), pytest.approx(3.3, abs=0.01))
    assert step(0.5) == (pytest.approx(0.0, abs=0.01), pytest.approx(0.0, abs=0.01))


def test_stacks_that_the_monitor_asked_for_are_no_progress(clock: SimpleNamespace) -> None:
    """A rank that writes its stack for the monitor stands where it stood."""
    ring, watch = Ring(), ActivityWatch()
    for _ in range(3):
        watch.step({0: ring})  # type: ignore[dict-item]
        clock.s += 1.1
    since_ns = watch.idle_since_ns()[0]
    clock.work = processes.Work(0.0, 2048)
    watch.pass_over({0: ring})  # type: ignore[dict-item]
    watch.step({0: ring})  # type: ignore[dict-item]
    assert watch.idle_since_ns()[0] == since_ns


def test_the_work_of_a_process_includes_its_children(tmp_path: Path) -> None:
    """A rank that waits for a program it has started does its work through it."""
    import subprocess
    import sys

    before = processes.work_of(processes.os.getpid())
    count = "sum(range(10**6)); input()"
    with subprocess.Popen([sys.executable, "-c", count], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(b"\n")
    assert processes.work_of(processes.os.getpid()).cpu_s > before.cpu_s


def test_the_work_of_the_one_who_asks_is_not_the_ranks() -> None:
    """A rank that has started the monitor would never be idle: the monitor reads all the time."""
    import subprocess
    import sys

    program = (
        "import os; from distsim.debug.evidence.processes import work_of\n"
        "before = work_of(os.getppid())\n"
        "open('/proc/self/maps').read()\n"
        "print(work_of(os.getppid()) == before)"
    )
    parent = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
    done = subprocess.run([sys.executable, "-c", parent, program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
