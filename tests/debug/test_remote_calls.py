"""Remote calls that are not answered, from hand-made records: who, to whom, which function, and where the callee is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.diagnosis.waits.wait_graph import RemoteWaits
from distsim.debug.matching.index import Answer, EvidenceIndex, RemoteCalls, agent, anyone, rank_of, serving
from distsim.debug.monitor.sent_evidence import SentEvidence, received, sent
from distsim.debug.records import CallRecord, CallWait, Evidence, Group, Phase, RankState, Site, State
from distsim.debug.records.call import SERVE, Remote
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.debug.report.render import render_diagnoses
from distsim.remote_calls.diagnosis import calls_at_its_end
from distsim.report.html.collect import wait_edges
from distsim.text.codec import convert, pack, unpack
from tests.debug.test_case_rules import case_of

RPC = Group("rpc", "rpc", (0, 1))
NOW_S = 10.0


class Worker:
    """The records of one worker, in the order they were made."""

    def __init__(self, rank: int, threads: int = 1) -> None:
        self.rank = rank
        self.threads = threads
        self.calls: list[CallRecord] = []

    def _add(self, op: str, line: int, thread: str, at_s: float, **kw: Any) -> CallRecord:
        site = Site("work.py", line, "f")
        call = CallRecord(
            self.rank, RPC, len(self.calls) + 1, op, site=site, stack=(site,), thread=thread, issued_s=at_s,
            index=len(self.calls), **kw,
        )  # fmt: skip
        self.calls.append(call)
        return call

    def call(self, to: int, function: str, line: int, thread: str = "MainThread", **kw: Any) -> CallRecord:
        """It calls worker *to*."""
        own = {k: kw.pop(k) for k in ("gives_up_s", "rref") if k in kw}
        remote = Remote(function, f"w{self.rank}", f"w{to}", self.threads, **own)
        return self._add(kw.pop("op", "rpc_sync"), line, thread, 1.0, peer=to, remote=remote, **kw)

    def serve(self, call: CallRecord, thread: str = "RPC 1", line: int = 90, **kw: Any) -> CallRecord:
        """A thread of it serves *call*."""
        assert call.remote is not None
        request = call.rank, call.index
        remote = Remote(call.remote.function, f"w{call.rank}", f"w{self.rank}", self.threads, request=request)
        return self._add(SERVE, line, thread, 2.0, peer=call.rank, remote=remote, **kw)

    def collective(self, op: str, line: int, thread: str = "MainThread", seq: int = 1) -> CallRecord:
        """It makes a collective call of all."""
        call = self._add(op, line, thread, 3.0)
        call.seq = seq
        return call


def blocked(call: CallRecord) -> RankState:
    return RankState(call.rank, Phase.BLOCKED, (CallWait(call),), since_s=call.issued_s, host="h")


def judged(
    workers: Sequence[Worker], states: Sequence[RankState], hang_after_s: float | None = 60.0
) -> tuple[list[Diagnosis], Evidence]:
    """What is said, and of what; the evidence has gone from one host to another."""
    records = {worker.rank: worker.calls for worker in workers}
    here = Evidence(len(workers), {s.rank: s for s in states}, records, NOW_S, hang_after_s=hang_after_s)
    there = received(unpack(pack(sent(here)), SentEvidence))
    evidence = Evidence(len(workers), there.ranks, there.records, NOW_S, hang_after_s=hang_after_s)
    return diagnose(evidence), evidence


def chain(threads: int) -> tuple[list[Worker], list[RankState]]:
    """w0 calls w1, which calls w0, which calls w1, each in a thread that serves."""
    a, b = Worker(0, threads), Worker(1, threads)
    first = a.call(1, "back", 58)
    b.serve(first)
    second = b.call(0, "back", 10, "RPC 1")
    a.serve(second)
    a.call(1, "back", 11, "RPC 1")
    last = b.collective("rpc_shutdown", 86)
    return [a, b], [blocked(first), blocked(last)]


def test_a_circle_of_threads() -> None:
    """Threads that all wait for one another are a deadlock at once: the circle, each with its function and its line."""
    found, evidence = judged(*chain(1))
    assert [d.kind for d in found] == [Kind.DEADLOCK_CYCLE]
    assert found[0].culprits == (0, 1)
    assert found[0].ends_job
    assert "num_worker_threads" in found[0].suggestion
    for said in (
        "at w0 (rank 0) the thread that serves back for w1 waits in rpc_sync of back to w1 (rank 1), at work.py:11",
        "w1 has no thread free to begin it (its only thread is busy)",
        "at w1 (rank 1) the thread that serves back for w0 waits in rpc_sync of back to w0 (rank 0), at work.py:10",
    ):
        assert said in found[0].explanation.replace("At w", "at w")
    for width in (80, 120):
        lines = render_diagnoses(found, evidence).plain(width).splitlines()
        assert all(len(line) <= width for line in lines)
        assert lines[0].startswith("HANG  deadlock cycle  ranks 0,1  rpc_sync  work.py:1")


def test_a_picture_of_threads() -> None:
    """Who waits for whom, as ranks: a thread that serves stands with its rank, and the line it waits at."""
    workers, states = chain(1)
    records = {worker.rank: worker.calls for worker in workers}
    edges = wait_edges(Evidence(2, {s.rank: s for s in states}, records, NOW_S, hang_after_s=60.0))
    assert {(tuple(edge.ranks), edge.needs, edge.where) for edge in edges} == {
        ((0,), (1,), "work.py:58"),
        ((0,), (1,), "work.py:11"),
        ((1,), (0,), "work.py:10"),
        ((1,), (0,), "work.py:86"),
    }


def test_a_thread_that_is_free_serves_on() -> None:
    """The same chain with a thread to spare says nothing: the next request is on its way."""
    assert judged(*chain(2))[0] == []


def test_no_thread_is_free_for_the_reply() -> None:
    """A worker whose only thread waits for a reply cannot take that reply: a circle of one."""
    a, b = Worker(0), Worker(1)
    first = a.call(1, "f", 5)
    b.serve(first)
    second = b.call(0, "g", 10, "RPC 1")
    a.serve(second, state=State.COMPLETED, completed_s=2.5)
    states = [blocked(first), RankState(1, Phase.RUNNING, host="h")]
    (found,) = judged([a, b], states)[0]
    assert (found.kind, found.culprits, found.victims) == (Kind.DEADLOCK_CYCLE, (1,), (0,))
    assert "no thread of its own is free to take the reply" in found.explanation


def test_a_function_that_waits_for_its_callers_collective() -> None:
    """What is served makes a collective whose other member waits for the answer: groups and calls in one graph."""
    a, b = Worker(0, 4), Worker(1, 4)
    first = a.call(1, "step", 5)
    b.serve(first)
    b.collective("all_reduce", 38, "RPC 1")
    (found,) = judged([a, b], [blocked(first), RankState(1, Phase.RUNNING, host="h")])[0]
    assert (found.kind, found.culprits) == (Kind.DEADLOCK_CYCLE, (0, 1))
    assert "the thread that serves step for w0 waits in all_reduce #1" in found.explanation
    assert "rpc_sync of step to w1 (rank 1), at work.py:5" in found.explanation
    assert "that its caller does only after" in found.suggestion, "more threads would not help here"


def test_functions_that_are_served_meet_in_a_collective() -> None:
    """Who comes to a group's call may be a thread that serves: while one runs, its rank is not missing."""
    master, workers = Worker(2, 4), [Worker(0, 4), Worker(1, 4)]
    calls = [master.call(i, "train", 50 + i, op="rpc_async", is_async=True) for i in range(2)]
    calls[0].waited = True
    ends = []
    for worker, call in zip(workers, calls, strict=True):
        worker.serve(call)
        ends.append(worker.collective("rpc_shutdown", 56))
    inside = workers[0].collective("all_reduce", 24, "RPC 1")
    inside.group = Group("7", "trainers", (0, 1))
    states = [*(blocked(end) for end in ends), blocked(calls[0])]
    assert judged([*workers, master], states)[0] == []
    workers[1].calls[0].state = State.COMPLETED  # and nobody is left to come
    found = judged([*workers, master], states)[0]
    assert [d.kind for d in found] != []


@pytest.mark.parametrize("patience_s", [60.0, 5.0])
def test_a_function_that_does_not_come_back(patience_s: float) -> None:
    """It may compute: it is told once others have waited as long as you allow, and where it is."""
    a, b = Worker(0, 4), Worker(1, 4)
    first = a.call(1, "stuck", 60)
    b.serve(first, line=13)
    last = b.collective("rpc_shutdown", 86)
    found = judged([a, b], [blocked(first), blocked(last)], patience_s)[0]
    if patience_s > NOW_S:
        assert found == []
        return
    assert [(d.kind, d.culprits, d.victims) for d in found] == [(Kind.HOST_STUCK, (1,), (0,))]
    assert "w1 (rank 1) has run stuck for w0 for 8.0 s, and it has not come back: it is at work.py:13" in (
        found[0].explanation
    )
    assert found[0].ends_job


def test_an_rref_whose_value_is_not_made_keeps_shutdown() -> None:
    """All workers are in shutdown, and one still makes the value of an RRef: it is named, with its function."""
    a, b = Worker(0, 4), Worker(1, 4)
    made = a.call(1, "never", 20, op="remote", is_async=True, rref=(0, 7))
    b.serve(made, line=32)
    ends = [worker.collective("rpc_shutdown", 86) for worker in (a, b)]
    (found,) = judged([a, b], [blocked(end) for end in ends], 5.0)[0]
    assert (found.kind, found.culprits) == (Kind.HOST_STUCK, (1,))
    assert "has run never for w0" in found.explanation
    assert "An RRef is to hold its value: until it does, shutdown cannot free it." in found.explanation


def test_to_here_waits_for_the_call_that_makes_the_value() -> None:
    """A third worker that fetches the value waits for the thread that makes it, by the RRef's number."""
    workers = [Worker(rank, 4) for rank in range(3)]
    made = workers[0].call(1, "never", 20, op="remote", is_async=True, rref=(0, 7))
    workers[1].serve(made, line=32)
    fetch = workers[2].call(1, "", 50, op="to_here", rref=(0, 7))
    states = [RankState(0, host="h"), RankState(1, host="h"), blocked(fetch)]
    (found,) = judged(workers, states, 5.0)[0]
    assert found.victims == (2,)
    assert "Worker w1 (rank 1) has run never for w0" in found.explanation
    assert "Rank 2 waits for that in to_here from w1 (rank 1), at work.py:50" in found.explanation


def test_a_dead_callee() -> None:
    """The callee is gone: its death is the fault, and the call that waits for it is named with its line."""
    a, b = Worker(0, 4), Worker(1, 4)
    first = a.call(1, "die", 76)
    b.serve(first)
    killed = RankState(1, Phase.KILLED, signal="SIGKILL", exit_code=-9, host="h")
    (found,) = judged([a, b], [blocked(first), killed])[0]
    assert (found.kind, found.culprits, found.victims) == (Kind.RANK_KILLED, (1,), (0,))
    assert "Rank 0 waits in rpc_sync of die to w1 (rank 1) at work.py:76" in found.explanation
    assert "It was serving die for w0" in found.explanation


def test_the_end_of_a_connection_is_no_fault_of_the_callers() -> None:
    """Where the callee has died, the caller's exception about it only follows."""
    a, b = Worker(0, 4), Worker(1, 4)
    error = "RuntimeError: eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)"
    a.call(1, "die", 76, state=State.FAILED, completed_s=3.0, error=error)
    states = [
        RankState(0, Phase.RAISED, exception=error, host="h"),
        RankState(1, Phase.EXITED, exit_code=7, host="h"),
    ]
    found = judged([a, b], states)[0]
    assert [(d.kind, d.culprits, d.victims) for d in found] == [(Kind.RANK_EXITED, (1,), (0,))]


def test_a_worker_that_never_came() -> None:
    """init_rpc is a meeting of all workers: who is not there never joined."""
    a = Worker(0, 4)
    first = a.collective("init_rpc", 55)
    found = judged([a, Worker(1)], [blocked(first), RankState(1, Phase.ABSENT, joining=True)])[0]
    assert [(d.kind, d.culprits, d.victims) for d in found] == [(Kind.NEVER_JOINED, (1,), (0,))]


def test_a_call_with_a_time_of_its_own_is_no_hang() -> None:
    """A call that the program has limited ends by itself, however long the callee takes."""
    workers, states = chain(1)
    limited = workers[0].calls[-1]
    assert limited.remote is not None
    workers[0].calls[-1].remote = Remote("back", "w0", "w1", 1, gives_up_s=2.0)
    assert judged(workers, states)[0] == []


def test_a_circle_outlives_the_time_of_its_calls_where_nothing_moves() -> None:
    """That a call's own time is over is told by a thread of its worker, too: where none is free, nobody hears of it."""
    workers, states = chain(1)
    for call in (call for worker in workers for call in worker.calls):
        if call.remote is not None and call.op != SERVE:
            call.remote = msgspec.structs.replace(call.remote, gives_up_s=2.0)
    evidence = Evidence(2, {s.rank: s for s in states}, {w.rank: w.calls for w in workers}, NOW_S)
    assert diagnose(evidence) == []
    (found,) = diagnose(evidence, nothing_moves=True)
    assert (found.kind, found.culprits) == (Kind.DEADLOCK_CYCLE, (0, 1))


@pytest.mark.parametrize(
    ("answered", "said"),
    [(False, "w1 (rank 1) is still in it, at work.py:16"), (True, "w1 (rank 1) has answered since.")],
)
def test_a_call_that_gave_up(answered: bool, said: str) -> None:
    """Its own time was over: an exception of the caller's, with where the callee still is; no hang."""
    a, b = Worker(0, 4), Worker(1, 4)
    error = "RuntimeError: RPCErr:1:RPC ran for more than set timeout (1000 ms) and will now be marked with an error"
    call = a.call(1, "slow", 70, state=State.FAILED, completed_s=2.0, error=error, gives_up_s=1.0)
    b.serve(call, line=16, **({"state": State.COMPLETED, "completed_s": 2.5} if answered else {}))
    states = [RankState(0, Phase.RAISED, exception=error, host="h"), RankState(1, Phase.RUNNING, host="h")]
    (found,) = judged([a, b], states)[0]
    assert (found.kind, found.culprits) == (Kind.RANK_RAISED, (0,))
    assert "it gave up on rpc_sync of slow to w1 (rank 1) after 1.0 s" in found.explanation
    assert said in found.explanation


def test_a_worker_that_lives_and_does_not_answer() -> None:
    """No thread has begun the call, and some are free: in the end the worker itself is named."""
    a, b = Worker(0, 4), Worker(1, 4)
    first = a.call(1, "f", 60)
    last = b.collective("rpc_shutdown", 86)
    assert judged([a, b], [blocked(first), blocked(last)])[0] == []
    (found,) = judged([a, b], [blocked(first), blocked(last)], 5.0)[0]
    assert (found.kind, found.culprits, found.victims) == (Kind.HOST_STUCK, (1,), (0,))
    assert "no thread of it serves the call" in found.explanation
    assert found.explanation.startswith("Worker w1 (rank 1) has not answered for 9.0 s")
    assert found.detected_after_s == 9.0


@pytest.mark.parametrize("caller", [0, 2])
def test_who_ends_while_he_serves_what_nobody_waits_for(caller: int) -> None:
    """A program that has ended well is at no fault for a function that a thread of it still ran; one that was killed
    is told of as ever, and never as waiting for itself."""
    workers = [Worker(rank, 4) for rank in range(3)]
    workers[1].serve(workers[caller].call(1, "loop", 5, op="rpc_async", is_async=True))
    states = {rank: RankState(rank, Phase.FINISHED, exit_code=0, host="h") for rank in range(3)}
    assert judged(workers, list(states.values()), 0.0)[0] == []
    states[1] = RankState(1, Phase.KILLED, signal="SIGKILL", host="h")
    (found,) = judged(workers, list(states.values()), 0.0)[0]
    assert (found.kind, found.victims) == (Kind.RANK_KILLED, ())
    assert "was serving loop" in found.explanation
    assert "waits in" not in found.explanation


def test_a_served_call_whose_record_is_overwritten() -> None:
    """A function that runs for hours makes more calls than records are kept: that its own record is gone is no silent
    worker."""
    a, b = Worker(0, 4), Worker(1, 4)
    first = a.call(1, "train", 5)
    later = b.call(0, "step", 9, "RPC 1", state=State.COMPLETED, completed_s=5.0)
    later.issued_s, later.index = 4.0, 9000
    states = [blocked(first), RankState(1, Phase.RUNNING, host="h")]
    assert judged([a, b], states, 5.0)[0] == []
    later.issued_s, later.index = 4.0, 0
    assert [d.kind for d in judged([a, b], states, 5.0)[0]] == [Kind.HOST_STUCK]


def test_a_future_that_nobody_sets() -> None:
    """An asynchronous function has freed its thread; its worker is told when the future stays open."""
    a, b = Worker(0, 1), Worker(1, 1)
    first = a.call(1, "later", 60)
    b.serve(first, is_async=True)
    (found,) = judged([a, b], [blocked(first), RankState(1, host="h")], 5.0)[0]
    assert "the future that it returned is not set" in found.explanation


@pytest.mark.parametrize("limit", [10**400, float("nan"), "soon"])
def test_a_limit_that_is_no_number(limit: object) -> None:
    """A damaged record is refused as one, whatever stands in it."""
    with pytest.raises(ValueError, match=r"\[4\]|out of range"):
        convert(["step", "w0", "w1", 1, limit, None, None], Remote)


def remote_calls(*workers: Worker) -> RemoteCalls:
    return RemoteCalls({worker.rank: worker.calls for worker in workers})


def test_a_request_and_its_service() -> None:
    """The callee's record tells which request it serves; a worker's name is on all of its records."""
    a, b = Worker(0), Worker(1)
    first, second = a.call(1, "f", 1), a.call(1, "g", 2)
    served = b.serve(second)
    calls = remote_calls(a, b)
    assert (calls.served(first), calls.served(second)) == (None, served)
    assert calls.request(served) is second
    assert calls.request(first) is None
    assert calls.request(a.collective("barrier", 3)) is None
    assert [calls.name(rank) for rank in (0, 1, 2)] == ["w0", "w1", None]
    assert calls.record(serving(served)) is served
    assert [calls.record(actor) for actor in (0, agent(1), anyone(1))] == [None] * 3
    assert [rank_of(actor) for actor in (0, serving(served), agent(2), anyone(3))] == [0, 1, 2, 3]


def test_a_fetch_waits_for_the_request_that_makes_its_value() -> None:
    """Where that is on record; other calls wait for themselves, whatever value they name."""
    a, b = Worker(0), Worker(1)
    makes = a.call(1, "f", 1, op="remote", rref=(0, 1))
    a.call(1, "f", 1, op="rpc_async", rref=(0, 3))
    rows = [("to_here", (0, 1), True), ("to_here", (0, 2), False), ("to_here", (0, 3), False), ("to_here", None, False),
            ("rpc_sync", (0, 1), False)]  # fmt: skip
    fetches = [(a.call(1, "to_here", 2, op=op, rref=rref), is_made) for op, rref, is_made in rows]
    calls = remote_calls(a, b)
    assert [calls.request_of(fetch) for fetch, _ in fetches] == [makes if made else fetch for fetch, made in fetches]


@pytest.mark.parametrize(("threads", "serves", "done", "busy"), [
    (1, 0, 0, 0), (1, 1, 0, 1), (2, 1, 0, 0), (2, 2, 0, 2), (2, 3, 0, 3), (2, 2, 1, 0), (0, 2, 0, 0), (1, 1, 1, 0),
])  # fmt: skip
def test_a_worker_without_a_free_thread_is_busy(threads: int, serves: int, done: int, busy: int) -> None:
    """As many calls as it has threads are being served; one that returned a future or ended has no thread."""
    a, b = Worker(0), Worker(1, threads)
    for n in range(serves):
        b.serve(a.call(1, "f", n), state=State.COMPLETED if n < done else State.ISSUED)
    b.serve(a.call(1, "f", 9), is_async=True)
    calls = remote_calls(a, b)
    assert len(calls.busy(1)) == busy
    assert calls.busy(0) == []
    assert [len(calls.open.get(rank, ())) for rank in (0, 1)] == [0, serves - done + 1]


def test_which_thread_an_answer_comes_from() -> None:
    """The thread that serves the call; else any of a worker that has none free; else the worker itself."""
    a, b = Worker(0), Worker(1, threads=1)
    served, waiting = a.call(1, "f", 1), a.call(1, "g", 2)
    by = b.serve(served)
    calls = remote_calls(a, b)
    assert calls.answer(served) == Answer((serving(by),))
    assert calls.answer(waiting) == Answer((serving(by),), busy=1)
    assert calls.answer(replace(waiting, peer=None)) == Answer(())
    by.state = State.COMPLETED
    calls = remote_calls(a, b)
    assert calls.answer(waiting) == Answer((agent(1),))
    assert calls.answer(served) == Answer((agent(1),))
    mine = a.serve(b.call(0, "h", 3))  # the reply to `served` needs a thread of worker 0
    assert remote_calls(a, b).answer(served) == Answer((serving(mine),), busy=0)
    assert remote_calls(a, b).answer(waiting) == Answer((agent(1),))


def test_a_reply_to_a_fetch_takes_no_thread() -> None:
    """Its value was made by another call, whose reply has come."""
    a, b = Worker(0, threads=1), Worker(1)
    b.serve(a.call(1, "f", 1, op="remote", rref=(0, 1)), state=State.COMPLETED)
    fetch = a.call(1, "to_here", 2, op="to_here", rref=(0, 1))
    a.serve(b.call(0, "h", 3))
    assert remote_calls(a, b).answer(fetch) == Answer((agent(1),))


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        ({}, True),
        ({"thread": "RPC 2"}, False),
        ({"state": State.COMPLETED}, False),
        ({"is_async": True}, False),
        ({"is_async": True, "waited": True}, True),
    ],
)
def test_what_a_serving_thread_waits_for(call: dict[str, Any], waits: bool) -> None:
    """Calls that it made since, and that it waits for; not what it serves, and nothing once it returned a future."""
    a, b = Worker(0), Worker(1)
    request = a.call(1, "f", 1)
    before = b.call(0, "g", 2, "RPC 1")
    served = b.serve(request)
    own = b.call(0, "g", 2, **{"thread": "RPC 1", **call})
    again = b.serve(request)
    calls = remote_calls(a, b)
    assert calls.waits_of(served, [before, served, own, again]) == ([own] if waits else [])
    assert calls.waits_of(replace(served, is_async=True), [own]) == []


@pytest.mark.parametrize(("serves", "text"), [(0, None), (1, "."), (2, ", and 1 more."), (3, ", and 2 more.")])
def test_what_a_worker_was_serving_when_it_died(serves: int, text: str | None) -> None:
    """The first call, and how many more there were; one that raised has told why itself."""
    a, b = Worker(0), Worker(1, 4)
    for _ in range(serves):
        b.serve(a.call(1, "loop", 5))
    records = {worker.rank: worker.calls for worker in (a, b)}
    for phase in (Phase.KILLED, Phase.RAISED):
        evidence = Evidence(2, {0: RankState(0), 1: RankState(1, phase)}, records, NOW_S)
        found = calls_at_its_end(case_of(evidence), 1)
        assert bool(found) is (text is not None and phase is Phase.KILLED)
        assert not found or found.endswith(f"in f{text}")


OVERWRITTEN: list[tuple[str, dict[str, Any], bool]] = [
    ("its records were cut, and begin later", {}, True),
    ("they begin before the call", {"first_s": 0.5}, False),
    ("they begin with it", {"first_s": 1.0}, False),
    ("none is left", {"empty": True}, True),
    ("all are there", {"cut": False}, False),
    ("it is served", {"served": True}, False),
    ("a fetch of a value that a rank that was cut has made", {"op": "to_here", "rref": (1, 7)}, True),
    ("of one that another rank has made", {"op": "to_here", "rref": (0, 7)}, False),
    ("of nothing", {"op": "to_here"}, False),
]


@pytest.mark.parametrize(("law", "facts", "overwritten"), OVERWRITTEN, ids=[row[0] for row in OVERWRITTEN])
def test_records_of_callees_that_may_be_overwritten(law: str, facts: dict[str, Any], overwritten: bool) -> None:
    """A callee whose oldest record is younger than the call may have served it."""
    a, b = Worker(0), Worker(1)
    call = a.call(1, "f", 5, op=facts.get("op", "rpc_sync"), rref=facts.get("rref"))
    if facts.get("served"):
        b.serve(call)
    elif not facts.get("empty"):
        b.collective("barrier", 9).issued_s = facts.get("first_s", 2.0)
    cut = frozenset({1}) if facts.get("cut", True) else frozenset[int]()
    evidence = Evidence(2, {0: blocked(call), 1: RankState(1)}, {0: a.calls, 1: b.calls}, NOW_S, cut=cut)
    waits = RemoteWaits(EvidenceIndex(evidence), (), nothing_moves=True)
    assert waits._may_be_overwritten(call, 1) is overwritten
