"""What guards saw by themselves, merged with what the records say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.evidence.guard_findings import race, unwaited
from distsim.debug.records import CallWait, Finding, Phase, RankState, Site, State
from distsim.debug.records.kinds import Kind
from tests.debug.builders import FILE, all_reduce, barrier, coll, play, recv, run, send, wait_all


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [
        (Kind.NAN, 1),
        (Kind.BUFFER_MODIFIED_IN_FLIGHT, 4),
        (Kind.DDP_UNUSED_PARAMETER, 1),
        (Kind.ASYNC_NEVER_WAITED, 0),
        (Kind.ALIASED_OUTPUTS, 0),
        (Kind.STRAGGLER, 0),
        (Kind.NETWORK_FAULT, 3),
        (Kind.THREAD_RACE, 4),
    ],
)
def test_finding_stands_by_itself(kind: Kind, exit_code: int) -> None:
    """A finding in a run that goes on is a diagnosis of its own, with place, text and advice."""
    evidence = play(2, lambda r: [all_reduce(10)])
    call = evidence.records[1][0]
    evidence.findings = [Finding(kind, (1,), "rank 1 has 3 of them", call=call, at_s=0.1)]
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.exit_code, str(d.call)) == (kind, (1,), exit_code, "all_reduce #1")
    assert d.explanation.startswith("Rank 1 has 3 of them. ")
    assert "train.py:10" in d.explanation
    assert d.suggestion


def test_a_race_is_one_finding_with_one_number() -> None:
    """Threads named otherwise that meet at two lines, and a guard that saw them race: one report, about threads."""
    evidence = play(
        2,
        lambda r: (
            [coll("broadcast", 8, root=0, thread="two"), all_reduce(5, thread="one")]
            if r
            else [all_reduce(5, thread="one")]
        ),
    )
    (before,) = diagnose(evidence)
    call = replace(evidence.records[1][0], op="all_reduce", seq=2, thread="one")
    evidence.findings = [race(call)]
    (told,) = diagnose(evidence)
    assert (before.kind, told.kind) == (Kind.THREAD_RACE, Kind.THREAD_RACE)
    assert str(told.call) == str(before.call)
    assert "#2" not in told.explanation
    assert "thread" in told.suggestion
    assert "thread" in before.suggestion


def test_a_race_explains_another_order() -> None:
    """The records alone look like two swapped lines; the guard saw the threads."""
    evidence = play(2, lambda r: [all_reduce(10), barrier(11)] if r else [barrier(11), all_reduce(10)])
    assert diagnose(evidence)[0].kind is not Kind.THREAD_RACE
    evidence.findings = [race(replace(evidence.records[0][0], thread="metrics"))]
    assert [d.kind for d in diagnose(evidence)] == [Kind.THREAD_RACE]


def test_a_race_shows_the_lines_of_the_program() -> None:
    """The thread of an executor has no line of the program: the line where its rank stands instead says more."""
    evidence = play(2, lambda r: [all_reduce(10), barrier(11)] if r else [barrier(11), all_reduce(10)])
    elsewhere = Site("/usr/lib/python3/site-packages/torch/distributed/checkpoint/_async_thread_executor.py", 30, "run")
    evidence.findings = [race(replace(evidence.records[0][0], thread="executor", site=elsewhere))]
    (d,) = diagnose(evidence)
    assert {rank: str(site) for rank, site in d.sites.items()} == {0: "train.py:11", 1: "train.py:10"}
    assert "_async_thread_executor.py:30" in d.explanation


def test_a_slow_rank_is_not_accused_of_its_last_call() -> None:
    """It is slow before all of them, and which one was last depends on the moment."""
    evidence = play(2, lambda r: [all_reduce(10)])
    pace = {"excess_s": 0.3}
    evidence.findings = [
        Finding(
            Kind.STRAGGLER, (1,), "rank 1 works longer", call=evidence.records[1][0], pace=pace, site=Site(FILE, 10, "")
        )
    ]
    assert diagnose(evidence)[0].explanation == "Rank 1 works longer."


def test_unused_parameter_explains_the_hang() -> None:
    """A DDP finding about the rank that is missing takes over its victims and comes first."""
    evidence = play(4, lambda r: [all_reduce(10)] * (1 if r == 2 else 2))
    evidence.findings = [Finding(Kind.DDP_UNUSED_PARAMETER, (2,), "parameter head.bias got no gradient on rank 2")]
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.victims) == (Kind.DDP_UNUSED_PARAMETER, (2,), (0, 1, 3))
    assert "head.bias" in d.explanation
    assert "all_reduce #2" in d.explanation


def test_network_fault_has_the_waiting_as_victims() -> None:
    """All members came and nothing moves: the cut link is named, the waiting ranks are its victims."""
    evidence = play(4, lambda r: [all_reduce(10, is_async=True), wait_all()])
    for rank in range(4):
        record = evidence.records[rank][0]
        record.state = State.STARTED
    evidence.ranks = {r: RankState(r, Phase.BLOCKED, (CallWait(evidence.records[r][0]),)) for r in range(4)}
    assert diagnose(evidence) == []
    evidence.findings = [Finding(Kind.NETWORK_FAULT, (1,), "link nic1 -> leaf0 is down since 0.5 s")]
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.victims, d.exit_code) == (Kind.NETWORK_FAULT, (1,), (0, 2, 3), 3)
    assert set(d.stuck) == {0, 1, 2, 3}


def test_warnings_come_last() -> None:
    """A straggler does not hide the hang, whichever happened first."""
    evidence = play(4, lambda r: [all_reduce(10), barrier(11)][: 1 if r == 3 else 2])
    evidence.findings = [Finding(Kind.STRAGGLER, (0,), "rank 0 took 3 s longer", at_s=0.0)]
    assert [d.kind for d in diagnose(evidence)] == [Kind.MISSING_RANK, Kind.STRAGGLER]


def test_straggler_below_the_threshold_is_nothing() -> None:
    """A running rank is trusted until others have waited as long as asked."""
    evidence = play(3, lambda r: [run(40)] if r == 1 else [all_reduce(10)], straggler_after_s=5.0, now_s=4.0)
    assert diagnose(evidence) == []
    evidence.now_s = 6.0
    assert [d.kind for d in diagnose(evidence)] == [Kind.STRAGGLER]


def test_unwaited_handles_are_found_once_a_line() -> None:
    """Handles without a wait() by the end: one finding a line, over all its ranks."""
    evidence = play(
        3, lambda r: [all_reduce(10, is_async=True)] * 2 + ([wait_all()] if r == 0 else []) + [all_reduce(12)]
    )
    found = unwaited(evidence)
    assert [(f.kind, f.ranks, f.site and f.site.line) for f in found] == [(Kind.ASYNC_NEVER_WAITED, (1, 2), 10)]
    assert "each have 2 all_reduce calls" in found[0].text


def test_a_call_that_torch_refused_left_no_handle() -> None:
    """Who got an exception in place of a handle cannot wait for it."""
    evidence = play(2, lambda r: [all_reduce(10, is_async=True)])
    assert unwaited(evidence)
    evidence.records = {r: [replace(call, rejected=True) for call in calls] for r, calls in evidence.records.items()}
    assert not unwaited(evidence)


def test_of_very_many_unwaited_handles_only_the_newest_are_known() -> None:
    """Where older ones are no longer on record their number is a lower bound, and says so."""
    evidence = play(2, lambda r: [all_reduce(10, is_async=True)] * 500)
    assert "each have 500 all_reduce calls" in unwaited(evidence)[0].text
    evidence.cut = frozenset({0, 1})
    assert "each have at least 500 all_reduce calls" in unwaited(evidence)[0].text


def test_finished_with_a_call_under_way() -> None:
    """A rank that ends without waiting for its own asynchronous call makes the others hang."""
    evidence = play(3, lambda r: [all_reduce(10, is_async=True), wait_all()] if r else [all_reduce(11, is_async=True)])
    for rank in range(3):
        evidence.records[rank][0].state = State.STARTED
    for rank in (1, 2):
        waits = (CallWait(evidence.records[rank][0]),)
        evidence.ranks = {**evidence.ranks, rank: RankState(rank, Phase.BLOCKED, waits)}
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.victims, d.exit_code) == (Kind.ASYNC_NEVER_WAITED, (0,), (1, 2), 3)
    assert not d.is_warning


def test_unwaited_messages_count_too() -> None:
    """An isend without a wait() is found as well."""
    evidence = play(2, {0: [send(1, 10, is_async=True)], 1: [recv(0, 11)]})
    assert [f.ranks for f in unwaited(evidence)] == [(0,)]


def test_unwaited_calls_that_the_line_names() -> None:
    """A guard that does not see torch's own waits tells only of lines that have the call written out."""
    gather = coll("all_gather_into_tensor_coalesced", 3, is_async=True)  # torch's name for a functional call
    evidence = play(1, lambda r: [all_reduce(1, is_async=True), all_reduce(2, is_async=True), gather])
    lines = ("handle = dist.all_reduce(t, async_op=True)", "loss.backward()", "ops.all_gather_into_tensor(t, 1, name)")
    evidence.sources = {"train.py": "\n".join(lines)}
    assert [f.site.line for f in unwaited(evidence) if f.site] == [1, 2, 3]
    assert [f.site.line for f in unwaited(evidence, written_out=True) if f.site] == [1, 3]
