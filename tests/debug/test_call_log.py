"""Of a rank's calls the last are kept, and the others come to the same sums."""

from __future__ import annotations

import random
from collections.abc import Iterator

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.records import CallRecord, CallWait, Evidence, Group, Phase, RankState, Site, State
from distsim.debug.records.call_log import CallLog
from distsim.debug.records.kinds import Kind
from tests.debug import builders as b

WORLD = Group("0", "default_pg", (0, 1))


def calls(number: int) -> Iterator[CallRecord]:
    """Of several sizes, some asynchronous, that overlap."""
    draw, now_s = random.Random(0), 0.0
    for place in range(number):
        now_s += draw.random()
        begun_s = now_s + draw.random()
        yield CallRecord(
            0,
            WORLD,
            place + 1,
            draw.choice(("all_reduce", "broadcast")),
            dtypes=("float32",),
            nbytes=draw.choice((4, 1 << 20)),
            is_async=draw.random() < 0.5,
            waited=True,
            issued_s=now_s,
            started_s=begun_s,
            completed_s=begun_s + 3.0 * draw.random(),
            state=State.COMPLETED,
        )


def sums(log: CallLog) -> dict[str, tuple[int, int, float]]:
    found: dict[str, tuple[int, int, float]] = {}
    for alike in log.together():
        count, nbytes, time_s = found.get(alike.first.op, (0, 0, 0.0))
        found[alike.first.op] = count + alike.count, nbytes + alike.nbytes, time_s + alike.time_s
    return found


def test_a_window_and_all_come_to_the_same() -> None:
    """Number, bytes, times, and the time in which anything moved, overlaps counted once."""
    whole, window = CallLog(), CallLog(keep=20)
    for log in (whole, window):
        for record in calls(500):
            log.add(record, record.issued_s)
    assert len(whole.kept()) == 500
    assert not whole.is_cut
    assert 20 <= len(window.kept()) <= 30
    assert window.is_cut
    assert window.count == 500
    assert [r.index for r in window.kept()] == list(range(500 - len(window.kept()), 500))
    assert abs(whole.moving_s() - window.moving_s()) < 1e-9 * whole.moving_s()
    expected, found = sums(whole), sums(window)
    assert {op: told[:2] for op, told in found.items()} == {op: told[:2] for op, told in expected.items()}
    assert all(abs(found[op][2] - expected[op][2]) < 1e-9 for op in expected)


def test_a_program_that_never_waits_is_forgotten_too() -> None:
    """Its handles do not pile up: the newest are kept, and the sums have all."""
    log = CallLog(keep=8)
    for record in calls(400):
        record.is_async, record.waited = True, False
        if record.seq == 1:
            record.op = "new_group"
        log.add(record, record.issued_s)
    kept = log.kept()
    assert kept[0].op == "new_group"
    assert len(kept) <= 1 + 8 + 10
    assert kept[-1].index == 399
    assert sum(alike.count for alike in log.together()) == 400


def test_what_is_open_stays() -> None:
    """A call under way, a handle that nobody has waited for, and the calls that make groups."""
    log = CallLog(keep=4)
    made = list(calls(40))
    made[0].op, made[1].op = "init_process_group", "new_group"
    made[2].state, made[2].completed_s = State.STARTED, None
    made[3].is_async, made[3].waited = True, False
    for record in made:
        log.add(record, record.issued_s)
    kept = log.kept()
    assert [r.index for r in kept[:4]] == [0, 1, 2, 3]
    assert len(kept) < 12
    assert sum(alike.count for alike in log.together()) == 39  # each once, and not the one under way
    made[3].waited = True
    assert [r.index for r in log.kept()[:3]] == [0, 1, 2]


def test_a_rank_whose_first_call_stays_is_cut_all_the_same() -> None:
    """Messages whose other end may be forgotten are not lonely ones."""
    evidence = b.play(2, {0: [b.send(1, 1)], 1: []})
    lonely = evidence.records[0][-1]
    lonely.state, lonely.completed_s = State.COMPLETED, 1.0
    states = {rank: RankState(rank, Phase.FINISHED) for rank in (0, 1)}
    for cut, pairs in ((frozenset[int](), [lonely]), (frozenset({1}), [])):
        told = Evidence(2, states, evidence.records, cut=cut)
        assert EvidenceIndex(told).pairs.lonely_sends == pairs


WORLD = Group("0", "default_pg", (0, 1, 2))


def forgotten(rank: int, left: list[tuple[str, int, int, bool]], phase: Phase) -> tuple[RankState, list[CallRecord]]:
    """What is left of a rank's calls: of each its operation, number, index, and whether it is asynchronous. The last
    one of a rank that is blocked is open."""
    made = []
    for op, seq, index, is_async in left:
        done = phase is Phase.FINISHED or index < left[-1][2]
        site = Site("train.py", 5 if is_async else 10, "main")
        made.append(
            CallRecord(
                rank, WORLD, seq, op, dtypes=("float32",), input_shapes=((2,),), site=site, stack=(site,), index=index,
                is_async=is_async, issued_s=float(index), completed_s=index + 0.5 if done else None,
                state=State.COMPLETED if done else State.ISSUED,
            )
        )  # fmt: skip
    waits = () if phase is Phase.FINISHED else (CallWait(made[-1]),)
    code = 0 if phase is Phase.FINISHED else None
    return RankState(rank, phase, waits, site=made[-1].site, exit_code=code, host="h"), made


def told(ranks: list[tuple[RankState, list[CallRecord]]], *cut: int) -> list[tuple[Kind, tuple[int, ...]]]:
    states = {state.rank: state for state, _ in ranks}
    records = {state.rank: made for state, made in ranks}
    found = diagnose(Evidence(3, states, records, 100.0, cut=frozenset(cut)), nothing_moves=True)
    return [(d.kind, d.culprits) for d in found]


def test_a_handle_that_nobody_waited_for_accuses_nobody() -> None:
    """Of a long run's first calls one rank's are kept, whose handles it has dropped: that the others have none of them
    is no call too many."""
    late = [("all_reduce", seq, seq, False) for seq in range(60, 64)]
    first = [("init_process_group", 1, 0, False)]
    early = [("all_reduce", seq, seq, True) for seq in range(1, 4)]
    ranks = [
        forgotten(0, [*first, *early, *late, ("all_reduce", 64, 64, False)], Phase.BLOCKED),
        forgotten(1, [*first, *late], Phase.FINISHED),
        forgotten(2, [*first, *late, ("all_reduce", 64, 64, False)], Phase.BLOCKED),
    ]
    assert told(ranks, 0, 1, 2) == [(Kind.UNEVEN_ITERATIONS, (1,))]


def test_ranks_of_few_and_of_many_calls_meet() -> None:
    """A rank all of whose calls are kept meets, at the same number, one of whom the first are forgotten."""
    made = [("init_process_group", 1, 0, False), ("new_group", 1, 1, False)]
    few = [("all_reduce", seq, seq + 1, False) for seq in range(1, 6)]
    ranks = [
        forgotten(0, [*made, ("all_reduce", 5, 9000, False)], Phase.BLOCKED),
        forgotten(1, [*made, *few], Phase.BLOCKED),
        forgotten(2, [*made, ("all_reduce", 4, 8900, False)], Phase.FINISHED),
    ]
    assert [culprits for _, culprits in told(ranks, 0, 2)] == [(2,)]
