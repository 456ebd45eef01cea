"""Ranks that die in a call are its victims first; what killed them comes before them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.evidence.rank_state import settle_stuck
from distsim.debug.matching.secondary_errors import own_fault
from distsim.debug.messages import after_the_end, exception_line
from distsim.debug.records import CallRecord, CallWait, Evidence, Group, Phase, RankState, Site, State
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from tests.debug.builders import FILE, all_reduce, barrier, coll, fail, group, killed, play, recv, run, send


def die_inside(evidence: Evidence, rank: int, phase: Phase, failed_s: float | None = None, **kw: str) -> None:
    """The rank dies in the call it is blocked in."""
    last = evidence.records[rank][-1]
    if phase is Phase.RAISED:
        last.state, last.completed_s = State.FAILED, failed_s
    evidence.ranks[rank].phase = phase
    evidence.ranks[rank].waits = ()
    for name, value in kw.items():
        setattr(evidence.ranks[rank], name, value)


def test_abort_in_a_mismatch_is_the_mismatch() -> None:
    """gloo ends the receiver by SIGABRT on a size that differs: the shape is at fault, not the dead."""
    evidence = play(4, lambda r: [all_reduce(10, shape=(8,) if r == 1 else (4,)), barrier(11)])
    die_inside(evidence, 2, Phase.KILLED, signal="SIGABRT")
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.victims) == (Kind.SHAPE_MISMATCH, (1,), (0, 2, 3))


def test_abort_in_a_message_of_another_size() -> None:
    """The same between a send and a receive."""
    evidence = play(3, lambda r: {0: [send(1, 10)], 1: [recv(0, 11, shape=(8,))], 2: []}[r])
    die_inside(evidence, 1, Phase.KILLED, signal="SIGABRT")
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.pair) == (Kind.P2P_SIZE_MISMATCH, (0, 1), (0, 1))


def test_every_rank_raises_a_mismatch() -> None:
    """In strict mode all members raise at their own line: still one diagnosis, of the mismatch."""
    evidence = play(4, lambda r: [all_reduce(10, reduce_op="MAX" if r == 3 else "SUM")])
    for rank in range(4):
        die_inside(evidence, rank, Phase.RAISED, 1.0, exception="CollectiveMismatch: ...")
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.exit_code) == (Kind.REDUCE_OP_MISMATCH, (3,), 4)


def test_timeout_blames_who_never_came() -> None:
    """Ranks that time out are victims of the rank they waited for, though it still runs."""
    evidence = play(4, lambda r: [run(50)] if r == 3 else [all_reduce(10)])
    for rank in range(3):
        die_inside(evidence, rank, Phase.RAISED, 60.0, exception="DistBackendError: timed out")
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.victims) == (Kind.MISSING_RANK, (3,), (0, 1, 2))
    assert "train.py:50" in d.explanation


def test_timeout_blames_who_came_too_late() -> None:
    """A rank that comes after the others have given up waits for nobody, and is named."""
    evidence = play(4, lambda r: [all_reduce(10), barrier(11)])
    for rank in range(4):
        record = evidence.records[rank][0]
        evidence.records = {**evidence.records, rank: [record]}
        record.state, record.issued_s = (State.ISSUED, 90.0) if rank == 3 else (State.ISSUED, 1.0)
        evidence.ranks = {**evidence.ranks, rank: RankState(rank, Phase.BLOCKED)}
    for rank in range(3):
        die_inside(evidence, rank, Phase.RAISED, 61.0, exception="DistBackendError: timed out")
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.victims) == (Kind.MISSING_RANK, (3,), (0, 1, 2))
    assert "89.0 s late" in d.explanation


@pytest.mark.parametrize("first", [0, 1, 2])
def test_who_failed_in_the_call_comes_before_who_lost_it(first: int) -> None:
    """Rank 0's own arguments were wrong; the others raise because it is gone, whoever had come first."""
    evidence = play(3, lambda r: [coll("scatter", 10, root=0)])
    for rank in range(3):
        evidence.records[rank][-1].issued_s = 1.0 if rank == first else 2.0
        text = "RuntimeError: Connection closed by peer" if rank else "RuntimeError: Incorrect input list size 2"
        die_inside(evidence, rank, Phase.RAISED, 2.5 if rank else 1.5, exception=text)
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.victims) == (Kind.RANK_RAISED, (0,), (1, 2))
    assert "Incorrect input list" in d.explanation


def fail_in_scatter(size: int, raised: Sequence[str], said: Sequence[str | None]) -> Evidence:
    """All come to a scatter and raise in it; what the programs raised, and what the calls said."""
    evidence = play(size, lambda r: [coll("scatter", 10, root=0)])
    for rank in range(size):
        record = evidence.records[rank][-1]
        record.issued_s, record.error = 1.0, said[rank]
        die_inside(evidence, rank, Phase.RAISED, 1.5 if said[rank] == said[0] else 2.5, exception=raised[rank])
    return evidence


LOST = "RuntimeError: [pair.cc:537] Connection closed by peer [127.0.0.1]:4711"


def test_what_a_program_makes_of_a_loss_is_no_fault_of_its_own() -> None:
    """Ranks that raise another exception from gloo's are victims: their call said that the peer was gone."""
    wrong = "ValueError: scatter_list must be 3 long"
    failed = "StepFailed: step 7 failed"
    (d,) = diagnose(fail_in_scatter(3, [failed] * 3, [wrong, LOST, LOST]))
    assert (d.kind, d.culprits, d.victims) == (Kind.RANK_RAISED, (0,), (1, 2))


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: bad shape in pipeline stage 2",
        "KeyError: cannot restore optimizer",
        "TypeError: scatter() got an unexpected keyword argument 'timeout_s'",
        "ValueError: timeout must be positive",
        "ValueError: expected peers of one remoteness, got 3",
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_part_of_a_word_is_no_loss(text: str, known: bool) -> None:
    """An argument error that happens to contain `pipe`, `store` or `timeout` is its rank's own fault."""
    said = [text, LOST, LOST]
    (d,) = diagnose(fail_in_scatter(3, said, said if known else [None] * 3))
    assert (d.kind, d.culprits, d.victims) == (Kind.RANK_RAISED, (0,), (1, 2))


@pytest.mark.parametrize(
    "text",
    [
        LOST,
        "RuntimeError: Read error [127.0.0.1]:1: Connection reset by peer",
        "RuntimeError: writev [127.0.0.1]:1: Broken pipe",
        "RuntimeError: Application timeout caused pair closure",
        "RuntimeError: Timed out waiting 1000ms for recv operation to complete",
        "torch.distributed.DistStoreError: wait timeout after 1000ms, keys: /a",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.",
        "DistBackendError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1) ran for 9 ms",
        "DistBackendError: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
        "DistBackendError: NCCL communicator was aborted on rank 1.",
        "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors",
    ],
)
def test_what_a_lost_peer_is_called(text: str) -> None:
    """The words of gloo, NCCL and their stores for a peer that is gone or late are nobody's own fault."""
    assert not own_fault(text)


def test_a_mistake_that_nccl_refuses_is_ones_own() -> None:
    """Whatever the words around it, and its reason is said."""
    text = (
        "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, invalid usage (run with NCCL_DEBUG=WARN for "
        "details), NCCL version 2.27.3\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
        "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
    )
    assert own_fault(text)
    line = exception_line(RankState(1, Phase.RAISED, exception=text))
    assert line is not None
    assert line.startswith("DistBackendError: NCCL error in")
    assert line.endswith("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000")


@pytest.mark.parametrize("ended", [False, True])
def test_a_port_that_another_job_has_is_the_cause(ended: bool) -> None:
    """Rank 0 cannot serve the store; rank 1 may have met the other job's store, or be ended by its launcher."""
    both = Group("init", "default_pg", (0, 1))
    calls = {r: CallRecord(r, both, 1, "init_process_group", site=Site("t.py", 2, "m"), issued_s=1.0) for r in (0, 1)}
    text = (
        "DistNetworkError: The server socket has failed to listen on any local network address. port: 29799, useIpv6: "
        "false, code: -98, name: EADDRINUSE, message: address already in use"
    )
    other = RankState(1, Phase.KILLED) if ended else RankState(1, Phase.BLOCKED, (CallWait(calls[1]),))
    states = {0: RankState(0, Phase.RAISED, (CallWait(calls[0]),), exception=text), 1: other}
    first = diagnose(Evidence(2, states, {r: [calls[r]] for r in calls}, now_s=9.0))[0]
    assert (first.kind, first.culprits, first.exit_code) == (Kind.RANK_RAISED, (0,), 1)
    assert first.suggestion.startswith("Give this job another MASTER_PORT than 29799")


@pytest.mark.parametrize("other", [Phase.RUNNING, Phase.BLOCKED])
def test_init_that_raised_by_itself_waited_for_nobody(other: Phase) -> None:
    """A rank whose init_process_group failed for a reason of its own is the cause; one still to come is no absentee,
    one that came waits for it."""
    both = Group("init", "default_pg", (0, 1))
    calls = {r: CallRecord(r, both, 1, "init_process_group", site=Site("t.py", 2, "m"), issued_s=1.0) for r in (0, 1)}
    said = "RuntimeError: backend 'mpi': no MPI can be loaded"
    late = RankState(0, other, (CallWait(calls[0]),) if other is Phase.BLOCKED else ())
    records = {0: [calls[0]] if other is Phase.BLOCKED else [], 1: [calls[1]]}
    states = {0: late, 1: RankState(1, Phase.RAISED, (CallWait(calls[1]),), exception=said)}
    (found,) = diagnose(Evidence(2, states, records, now_s=9.0))
    assert (found.kind, found.culprits) == (Kind.RANK_RAISED, (1,))


def test_two_faults_in_one_call_are_not_each_others() -> None:
    """Two ranks fail in a call by themselves, each its own way: both are named, the third lost them."""
    said = ["ValueError: no tensors", "TypeError: a list of str", LOST]
    found = diagnose(fail_in_scatter(3, said, said))
    assert [(d.kind, d.culprits, d.victims) for d in found] == [
        (Kind.RANK_RAISED, (0,), (2,)),
        (Kind.RANK_RAISED, (1,), (2,)),
    ]


def test_a_fault_that_all_have_is_nobodys_alone() -> None:
    """Every rank raises the same in the call: all are named, nobody waits for anybody."""
    evidence = play(3, lambda r: [coll("scatter", 10, root=0)])
    for rank in range(3):
        die_inside(evidence, rank, Phase.RAISED, 1.5, exception="RuntimeError: unsupported dtype")
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.victims) == (Kind.RANK_RAISED, (0, 1, 2), ())


@pytest.mark.parametrize(("exception", "longer"), [("timed out", True), ("Connection closed by peer", False)])
def test_a_longer_timeout_is_advice_after_a_timeout(exception: str, longer: bool) -> None:
    """Who raised because the group is gone needs no longer timeout."""
    evidence = play(2, lambda r: [run(50)] if r == 1 else [all_reduce(10)])
    die_inside(evidence, 0, Phase.RAISED, 60.0, exception=f"RuntimeError: {exception}")
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits) == (Kind.MISSING_RANK, (1,))
    assert ("longer timeout" in d.suggestion) is longer


def test_who_closes_its_connections_and_lives_has_destroyed_the_group() -> None:
    """A rank that runs, but whose connections are gone, spends its time on nothing: it left the group early."""
    evidence = play(3, lambda r: [run(50)] if r == 1 else [all_reduce(10)])
    for rank in (0, 2):
        die_inside(evidence, rank, Phase.RAISED, 1.0, exception=LOST)
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.victims) == (Kind.MISSING_RANK, (1,), (0, 2))
    assert "Connections to it were closed while it ran" in d.explanation
    assert "before destroy_process_group()" in d.suggestion
    die_inside(evidence, 2, Phase.RAISED, 1.0, exception="RuntimeError: timed out")
    (d,) = diagnose(evidence)
    assert "destroy" not in d.explanation + d.suggestion


def test_who_holds_the_interpreter_is_said_to() -> None:
    """A heartbeat that stands still with its process alive: where the rank was seen last may not be where it is."""
    evidence = play(2, lambda r: [run(50)] if r == 1 else [all_reduce(10)])
    evidence.ranks[1].phase, evidence.ranks[1].silent_s = Phase.HOST_STUCK, 3.25
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits) == (Kind.HOST_STUCK, (1,))
    assert "last seen at train.py:50" in d.explanation
    assert "none of its Python threads has run for 3.2 s: one call holds the GIL" in d.explanation


def test_connection_reset_follows_the_killed() -> None:
    """Ranks that raise because a peer's process is gone are victims of the kill."""
    evidence = play(4, lambda r: [all_reduce(10), killed()] if r == 2 else [all_reduce(10), barrier(11)])
    for rank in (0, 1, 3):
        die_inside(evidence, rank, Phase.RAISED, 1.0, exception="RuntimeError: Connection closed by peer")
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.victims) == (Kind.RANK_KILLED, (2,), (0, 1, 3))


def test_killed_in_the_middle_of_a_collective() -> None:
    """A process killed inside a call that all had come to is the root."""
    evidence = play(3, lambda r: [all_reduce(10), barrier(11)])
    for rank in range(3):
        evidence.records[rank][-1].state = State.STARTED
        evidence.ranks[rank].phase = Phase.BLOCKED
    die_inside(evidence, 1, Phase.KILLED, signal="SIGKILL")
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.victims) == (Kind.RANK_KILLED, (1,), (0, 2))


@pytest.mark.parametrize("state", [State.ISSUED, State.COMPLETED])
def test_lost_in_a_wait_that_left_no_record(state: State) -> None:
    """DDP's reducer waits in C++ for a call that is recorded as under way, or done: who raised by itself is first."""
    evidence = play(3, lambda r: [all_reduce(10), fail("ValueError: bad gradient", 23)] if r == 1 else [all_reduce(10)])
    for rank in (0, 2):
        lost = dataclasses.replace(evidence.records[rank][-1], seq=1, index=1, is_async=True, state=state)
        evidence.records = {**evidence.records, rank: [*evidence.records[rank], lost]}
        evidence.ranks[rank].phase, evidence.ranks[rank].exception = Phase.RAISED, LOST
    first, *rest = diagnose(evidence)
    assert (first.kind, first.culprits) == (Kind.RANK_RAISED, (1,))
    assert first.victims == ((0, 2) if state is State.ISSUED else ())
    assert [d.culprits for d in rest] == ([] if state is State.ISSUED else [(0, 2)])


def test_raise_that_nobody_waits_for() -> None:
    """A rank that raises is reported even if no other rank hangs."""
    (d,) = diagnose(play(2, lambda r: [all_reduce(10), fail("KeyError: 1", 44)] if r else [all_reduce(10)]))
    assert (d.kind, d.culprits, d.victims, d.exit_code) == (Kind.RANK_RAISED, (1,), (), 1)


def test_all_ranks_raise_the_same() -> None:
    """One exception on every rank is one diagnosis."""
    (d,) = diagnose(play(4, lambda r: [fail("KeyError: 1", 44)]))
    assert (d.kind, d.culprits) == (Kind.RANK_RAISED, (0, 1, 2, 3))


WORKER = """RuntimeError: Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "data.py", line 11, in __getitem__
    raise OSError("corrupt jpeg 25")
OSError: corrupt jpeg 25
"""


@pytest.mark.parametrize(
    ("exception", "line"),
    [
        (WORKER, "RuntimeError: Caught OSError in DataLoader worker process 0. ... OSError: corrupt jpeg 25"),
        ("ValueError: a table\n1 2 3\n4 5 6", "ValueError: a table ..."),
        ("ValueError: " + "x" * 1000, "ValueError: " + "x" * 284 + " ..."),
    ],
)
def test_a_long_exception_is_a_line_of_the_sentence(exception: str, line: str) -> None:
    """What is left out stands in the traceback."""
    (d,) = diagnose(play(2, lambda r: [fail(exception, 44)] if r else [all_reduce(10)]))
    assert f"Rank 1 raised {line}, at train.py:44" in d.explanation


def test_addresses_in_exceptions_do_not_count() -> None:
    """Ranks that raised alike but for an object's address are one diagnosis, the same in every run."""
    evidence = play(4, lambda r: [fail(f"ValueError: <object at 0x7f0000{r:06x}>", 5)] if r else [all_reduce(10)])
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits) == (Kind.RANK_RAISED, (1, 2, 3))
    assert "raised ValueError: <object at 0x...>" in d.explanation


def test_two_causes_are_two_diagnoses() -> None:
    """Two groups that hang for two reasons: both are told, the earlier one first."""
    low, high = group(0, 1, name="1"), group(2, 3, name="2")
    evidence = play(
        4,
        {
            0: [all_reduce(10, low)],
            1: [fail("KeyError: 1", 44)],
            2: [all_reduce(12, high)],
            3: [killed()],
        },
    )
    evidence.ranks[1].since_s, evidence.ranks[3].since_s = 0.2, 0.1
    first, second = diagnose(evidence)
    assert (first.kind, first.culprits, first.victims) == (Kind.RANK_KILLED, (3,), (2,))
    assert (second.kind, second.culprits, second.victims) == (Kind.RANK_RAISED, (1,), (0,))


def test_killed_after_its_end_is_a_line() -> None:
    """A rank that aborts while its interpreter goes down, its calls done, has lost its exit code and is no fault of the
    job; what its launcher did to the others then is not told."""
    evidence = play(3, lambda r: [all_reduce(10), *([killed("SIGTERM" if r == 2 else "SIGABRT")] if r else [])])
    evidence.ranks[1].over = evidence.ranks[2].over = True
    assert diagnose(evidence) == []
    (line,) = after_the_end(evidence.ranks.values())
    assert line == (
        "rank 1 was killed by SIGABRT, after its program and all its calls had ended: only the exit code is lost"
    )


@pytest.mark.parametrize(
    ("signal", "words"),
    [
        ("SIGKILL", "out of memory"),
        ("SIGABRT", "last lines of rank 1 on stderr"),
        ("SIGSEGV", "memory that is not its own"),
        ("SIGBUS", "/dev/shm"),
        ("SIGFPE", "divided"),
        ("SIGILL", "another CPU"),
        ("SIGTERM", "scheduler"),
        ("SIGINT", "a person"),
        ("SIGUSR1", "who ended it"),
    ],
)
def test_only_sigkill_is_linked_with_memory(signal: str, words: str) -> None:
    """A process aborts and crashes by itself, and its last lines on stderr say why; other signals come from outside."""
    (d,) = diagnose(play(3, lambda r: [all_reduce(10), killed(signal)] if r == 1 else [all_reduce(10), barrier(11)]))
    assert (d.kind, d.culprits, d.victims) == (Kind.RANK_KILLED, (1,), (0, 2))
    assert words in d.suggestion
    assert ("kernel log" in d.suggestion) is ("out of memory" in d.suggestion) is (signal == "SIGKILL")


def test_killed_after_its_end_never_came() -> None:
    """If others wait for it all the same, they wait for a call that it left out, however it ended."""
    evidence = play(3, lambda r: [all_reduce(10), killed("SIGABRT") if r == 1 else barrier(11)])
    evidence.ranks[1].over = True
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.victims, d.exit_code) == (Kind.MISSING_RANK, (1,), (0, 2), 3)


LOOP_THEN_MORE = """
def main():
    for batch in data:
        all_reduce(batch)
    save()
    barrier()
"""


def uneven(last: RankState) -> Evidence:
    """Rank 1 made a call of the loop once less than three others, who wait in it; *last* is where it is now."""
    evidence = play(4, lambda rank: [all_reduce(4)] * (3 if rank == 1 else 4))
    return replace(evidence, ranks={**evidence.ranks, 1: last}, sources={FILE: LOOP_THEN_MORE}, hang_after_s=0.0)


def test_a_rank_that_left_the_loop_is_uneven_however_its_process_ends() -> None:
    """Ended by its launcher after its program, on its way out, or at a line behind the loop; at a line of the loop it
    may be late, and nothing says that it has left."""
    line = {number: Site(FILE, number, "main") for number in (4, 5)}
    for last in (
        RankState(1, Phase.FINISHED, exit_code=0),
        RankState(1, Phase.KILLED, signal="SIGTERM", exit_code=-15, over=True),
        RankState(1, Phase.RUNNING, leaving=True),
        RankState(1, Phase.RUNNING, site=line[5], stack=(line[5],)),
    ):
        (d,) = diagnose(uneven(last))
        assert (d.kind, d.culprits, d.victims) == (Kind.UNEVEN_ITERATIONS, (1,), (0, 2, 3)), d.explanation
        assert "made it 3 times and " in d.explanation
        assert "join()" in d.suggestion
    (d,) = diagnose(uneven(RankState(1, Phase.RUNNING, site=line[4], stack=(line[4],))))
    assert d.kind is Kind.MISSING_RANK


def test_micro_batches_of_fsdp_are_counted_together() -> None:
    """Each rank forms them by itself: no sampler makes their numbers equal, and FSDP has no join()."""
    text = LOOP_THEN_MORE.replace("for batch in data", "for micro in micro_batches") + "\nfully_shard(model)\n"
    (d,) = diagnose(replace(uneven(RankState(1, Phase.FINISHED, exit_code=0)), sources={FILE: text}))
    assert d.kind is Kind.UNEVEN_ITERATIONS
    assert "`micro_batches` (all_reduce (MAX) their number before the loop" in d.suggestion
    assert "join()" not in d.suggestion
    assert "drop_last" not in d.suggestion


def test_where_early_calls_are_overwritten_nobody_counts_rounds() -> None:
    """Rings keep the last calls: a rank is once short, and how often the loop ran is not claimed. Also where they begin
    at other calls."""
    evidence = uneven(RankState(1, Phase.FINISHED, exit_code=0))
    for first in (1, 2):
        records = {r: [c for c in calls if c.seq > (first if r == 1 else 1)] for r, calls in evidence.records.items()}
        (d,) = diagnose(replace(evidence, records=records))
        assert d.kind is Kind.UNEVEN_ITERATIONS
        assert "make all_reduce at train.py:4 1 more time than rank 1 on group" in d.explanation
        assert "Rank 1 made it last as #3 and finished." in d.explanation


def test_ranks_that_were_killed_after_their_end_are_no_finding_beside_one() -> None:
    """By their launcher, because another had failed, or while their interpreter shut down."""
    evidence = play(4, {0: [recv(1, 9)], 1: [recv(0, 8)], 2: [], 3: []})
    for signal in ("SIGTERM", "SIGSEGV"):
        gone = {rank: RankState(rank, Phase.KILLED, signal=signal, over=True) for rank in (2, 3)}
        (d,) = diagnose(replace(evidence, ranks={**evidence.ranks, **gone}))
        assert d.kind is Kind.DEADLOCK_CYCLE
    alone = play(2, {0: [], 1: []})
    gone = {rank: RankState(rank, Phase.KILLED, signal="SIGTERM", over=True) for rank in (0, 1)}
    assert diagnose(replace(alone, ranks=gone)) == []
    assert [line[:9] for line in after_the_end(gone.values())] == ["ranks 0,1"]


def third_step(idle_s: float | None, silent_s: float | None = None, limit_s: float = 30.0) -> Evidence:
    """Rank 1 runs at line 11 of a loop whose call at line 12 both have made twice; rank 0 gave up on it."""
    evidence = play(2, lambda r: [all_reduce(12)] * (3 - r) + [run(11)] * r, hang_after_s=60.0)
    call = evidence.records[0][-1]
    call.error = f"RuntimeError: Timed out waiting {limit_s * 1000:.0f}ms for recv operation to complete"
    die_inside(evidence, 0, Phase.RAISED, call.issued_s + limit_s, exception=call.error)
    evidence.now_s = call.issued_s + limit_s + 0.5
    evidence.ranks[1].idle_s, evidence.ranks[1].silent_s = idle_s, silent_s
    settle_stuck(evidence)
    return evidence


@pytest.mark.parametrize(("idle_s", "silent_s"), [(29.0, None), (0.0, 30.0)])
def test_a_rank_that_stood_still_until_the_others_gave_up_is_stuck(idle_s: float, silent_s: float | None) -> None:
    """In its data loader, or in a call that holds the GIL: it has not made fewer iterations, it is in the same one."""
    (d,) = diagnose(third_step(idle_s, silent_s))
    assert (d.kind, d.culprits, d.victims) == (Kind.HOST_STUCK, (1,), (0,))


def test_a_rank_that_computes_until_the_others_give_up_is_missing() -> None:
    """It was too slow for the timeout, and is still in the same iteration."""
    (d,) = diagnose(third_step(0.5))
    assert (d.kind, d.culprits, d.victims) == (Kind.MISSING_RANK, (1,), (0,))
    assert "longer timeout" in d.suggestion


def test_a_rank_that_is_idle_for_a_short_timeout_is_missing() -> None:
    """It may read a file: two seconds prove nothing of it, and the advice shows the limit."""
    (d,) = diagnose(third_step(2.0, limit_s=2.0))
    assert (d.kind, d.culprits, d.victims) == (Kind.MISSING_RANK, (1,), (0,))
    assert d.suggestion.endswith("Or pass a longer timeout= (it was 2 s).")


def ended_by_its_launcher(seen_s: float, idle_s: float) -> Diagnosis:
    """Rank 0 gave up on rank 1 after 30 s, and its launcher sent rank 1 a signal."""
    evidence = third_step(0.0)
    evidence.ranks[1] = replace(
        RankState(1, Phase.KILLED, signal="SIGTERM", site=Site(FILE, 11, "main")), seen_s=seen_s, stood_s=idle_s
    )
    (d,) = diagnose(evidence)
    return d


@pytest.mark.parametrize(("idle_s", "kind"), [(29.0, Kind.HOST_STUCK), (0.1, Kind.MISSING_RANK)])
def test_a_signal_after_a_timeout_is_the_launchers(idle_s: float, kind: Kind) -> None:
    """Torch's timeout ended the wait for a rank that stood still or was slow; its launcher ended it with the others."""
    d = ended_by_its_launcher(60.0, idle_s)
    assert (d.kind, d.culprits, d.victims, d.exit_code) == (kind, (1,), (0,), 3)
    assert "train.py:12, until the timeout of torch raised" in d.explanation
    assert "Later rank 1 was ended by SIGTERM" in d.explanation


def test_a_signal_before_a_timeout_is_the_fault() -> None:
    """Nothing of the rank moved when the other's wait ended: the wait is of its death."""
    assert ended_by_its_launcher(3.0, 0.0).kind is Kind.RANK_KILLED


def test_a_signal_to_all_ranks_comes_from_outside() -> None:
    """A launcher or a time limit ends a job: the kernel's log has nothing about it, and where the ranks were counts."""
    (d,) = diagnose(play(3, lambda r: [all_reduce(10), killed("SIGTERM")]))
    assert (d.kind, d.culprits, d.victims, d.exit_code) == (Kind.JOB_ENDED, (), (0, 1, 2), 1)
    assert "All ranks were ended by SIGTERM" in d.explanation
    assert "train.py:10" in d.explanation
    assert "kernel log" not in d.suggestion


def ended(
    signals: dict[int, str | None], seen_s: dict[int, float] | None = None, late: int | None = 1
) -> list[Diagnosis]:
    """All ranks were in one call that one had not come to, and were ended; each was last seen at its time."""
    evidence = play(3, lambda r: [run(6)] if r == late else [all_reduce(9)], sources={})
    for rank, state in evidence.ranks.items():
        state.phase, state.signal = Phase.KILLED, signals[rank]
        state.seen_s = (seen_s or {}).get(rank, 30.0)
    evidence.now_s, evidence.hang_after_s = 31.0, 20.0
    return diagnose(evidence)


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGXCPU", "SIGKILL", None])
def test_the_hang_is_the_verdict_whoever_ends_the_job(signal: str | None) -> None:
    """Also by SIGKILL, and by a signal that nobody saw, because a launcher waited for its ranks at once."""
    (d,) = ended(dict.fromkeys(range(3), signal))
    assert (d.kind, d.culprits, d.victims) == (Kind.MISSING_RANK, (1,), (0, 2))
    assert f"Later ranks 0-2 were ended by {signal or 'a signal that nobody saw'}, as " in d.explanation


def test_a_rank_that_was_killed_before_the_others_is_the_fault() -> None:
    """The kernel kills one, and its launcher ends the others: they are victims, and their end is a sentence."""
    (d,) = ended({0: "SIGTERM", 1: "SIGTERM", 2: "SIGKILL"}, late=None)
    assert (d.kind, d.culprits) == (Kind.RANK_KILLED, (2,))
    assert "Later ranks 0,1 were ended by SIGTERM" in d.explanation


def test_a_rank_that_is_killed_after_a_grace_period_was_ended_with_the_others() -> None:
    """It outlived the request by which they ended."""
    (d,) = ended({0: "SIGTERM", 1: "SIGKILL", 2: "SIGTERM"}, {1: 60.0})
    assert (d.kind, d.culprits) == (Kind.MISSING_RANK, (1,))
    assert "Later ranks 0-2 were ended by SIGTERM" in d.explanation


def test_a_rank_without_a_heartbeat_before_the_end_held_the_interpreter() -> None:
    """It was alive until the signal, which the others got as well."""
    (d,) = ended(dict.fromkeys(range(3)), {1: 7.0})
    assert d.culprits == (1,)
    assert "none of its Python threads has run for 23.0 s" in d.explanation


@pytest.mark.parametrize(
    ("phase", "exception", "inside"),
    [(Phase.RAISED, "KeyboardInterrupt: ", ()), (Phase.EXITED, None, ("signal handler SIGTERM",))],
)
def test_a_handler_of_a_signal_is_an_end_from_outside(
    phase: Phase, exception: str | None, inside: tuple[str, ...]
) -> None:
    """Python's own of Ctrl-C, or one of the program that saves its state and exits."""
    evidence = play(2, lambda r: [all_reduce(9)])
    for state in evidence.ranks.values():
        site = Site(FILE, 9, "m", inside=inside)
        state.phase, state.exception, state.exit_code = phase, exception, 143
        state.site, state.stack = Site(FILE, 3, "save"), (Site(FILE, 3, "save"), site)
        state.waits = ()
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.victims) == (Kind.JOB_ENDED, (), (0, 1))
