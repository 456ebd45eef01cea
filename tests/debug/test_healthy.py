"""No false alarm: legal programs, finished, running or under way, have an empty list."""

from __future__ import annotations

import random

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import CallRecord, Evidence, Group, Phase, RankState, Site, State
from distsim.debug.records.kinds import Kind
from tests.debug.builders import (
    Programs,
    Step,
    all_reduce,
    barrier,
    coll,
    group,
    play,
    recv,
    run,
    send,
    wait_all,
)

TP, DP = group(0, 1, name="1", desc="tp"), group(0, 1, name="2", desc="dp")


def on_two_groups(first: Group, second: Group) -> list[Step]:
    return [
        all_reduce(10, first, is_async=True),
        all_reduce(11, second, is_async=True),
        wait_all(),
        barrier(13),
    ]


HEALTHY: dict[str, tuple[int, Programs]] = {
    "async on two groups, waited for together": (
        2,
        lambda r: on_two_groups(TP, DP) if r == 0 else on_two_groups(DP, TP),
    ),
    "uneven point-to-point": (
        3,
        {
            0: [send(1, 10), send(1, 10), send(2, 10), barrier(5)],
            1: [recv(0, 11), recv(0, 11), barrier(5)],
            2: [recv(0, 12), barrier(5)],
        },
    ),
    "send and receive before a barrier": (
        4,
        lambda r: [send(1, 10) if r == 0 else recv(0, 11), barrier(12)] if r < 2 else [barrier(12)],
    ),
    "any source, three senders": (4, lambda r: [recv(None, 10)] * 3 if r == 0 else [send(0, 11)]),
    "isend and irecv in a ring": (
        4,
        lambda r: [
            send((r + 1) % 4, 10, is_async=True),
            recv((r - 1) % 4, 11, is_async=True),
            wait_all(),
        ],
    ),
    "root and others call from two lines": (
        4,
        lambda r: [coll("broadcast", 10 if r == 0 else 12, root=0), all_reduce(13)] * 3,
    ),
    "turns taken from two lines, two ranks": (
        2,
        lambda r: [all_reduce(10 if r == i % 2 else 12) for i in range(8)],
    ),
    "turns taken from two lines, four ranks": (
        4,
        lambda r: [all_reduce(10 if r == i % 4 else 12) for i in range(8)],
    ),
    "uneven all_gather": (
        3,
        lambda r: [coll("all_gather", 10, shape=(r + 1,), output_shapes=((1,), (2,), (3,)))],
    ),
    "uneven all_to_all": (
        2,
        lambda r: [
            coll(
                "all_to_all_single",
                10,
                shape=(3,) if r == 0 else (5,),
                output_shapes=((5,),) if r == 0 else ((3,),),
                input_splits=(1, 2) if r == 0 else (4, 1),
                output_splits=(1, 4) if r == 0 else (2, 1),
            )
        ],
    ),
    "scatter of a root's list": (
        3,
        lambda r: [coll("scatter", 10, root=1, output_shapes=((4,),), input_shapes=((4,),) * 3 if r == 1 else ())],
    ),
    "gather to a root": (
        3,
        lambda r: [coll("gather", 10, root=0, output_shapes=((4,),) * 3 if r == 0 else ())],
    ),
    "broadcast into another shape": (
        2,
        lambda r: [coll("broadcast", 10, root=0, shape=(2, 3) if r else (6,))],
    ),
    "subgroups of their own": (
        4,
        lambda r: [all_reduce(10, group(0, 1, name="1") if r < 2 else group(2, 3, name="2")), barrier(12)],
    ),
    "one rank is slow": (
        4,
        lambda r: [all_reduce(10), run(77)] if r == 2 else [all_reduce(10), all_reduce(11)],
    ),
    "a chain that ends in a running rank": (
        3,
        {0: [barrier(10)], 1: [recv(2, 11), barrier(12)], 2: [run(50)]},
    ),
    "nothing at all": (2, {}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_legal_program_gives_no_diagnosis(name: str) -> None:
    """A legal program has nothing wrong, however unevenly its ranks call."""
    size, programs = HEALTHY[name]
    found = diagnose(play(size, programs))
    assert found == [], [(d.kind, d.culprits, d.explanation) for d in found]


def test_group_number_that_starts_anew() -> None:
    """After destroy and a new initialization the numbers start again and nothing is mixed up."""

    def steps(rank: int) -> list[Step]:
        return [all_reduce(10), barrier(11)]

    evidence = play(2, steps)
    again = play(2, lambda r: [barrier(21), all_reduce(20)])
    for rank in range(2):
        first = list(evidence.records[rank])
        for record in again.records[rank]:
            record.index += len(first)
        evidence.records = {**evidence.records, rank: [*first, *again.records[rank]]}
    assert diagnose(evidence) == []


def test_destroy_is_no_meeting() -> None:
    """Ranks may destroy the group at different moments."""
    world = Group("0", "default_pg", (0, 1))
    site = Site("train.py", 9, "main")
    records = {
        0: [CallRecord(0, world, 1, "destroy_process_group", site=site, state=State.COMPLETED)],
        1: [CallRecord(1, world, 1, "barrier", site=site)],
    }
    states = {0: RankState(0), 1: RankState(1)}
    assert diagnose(Evidence(2, states, records)) == []


def test_oldest_records_overwritten() -> None:
    """A ring that lost a rank's early records does not make that rank absent from them."""
    evidence = play(3, lambda r: [all_reduce(10, is_async=True)] * 6 + [wait_all(), barrier(11)])
    kept = evidence.records[2][4:]
    evidence.records = {**evidence.records, 2: kept}
    for rank in (0, 1):
        first = evidence.records[rank][0]
        first.state = State.ISSUED  # its completion was not written yet
        evidence.ranks[rank].phase = Phase.BLOCKED
    assert diagnose(evidence) == []


@pytest.mark.parametrize("seed", range(40))
def test_a_callback_runs_at_once_or_in_a_thread(seed: int) -> None:
    """Its call is made on the caller's stack, or later in a thread of torch's: another stack is no other call."""
    main = (Site("train.py", 21, "<module>"),)
    ways = [all_reduce(17, callers=main), all_reduce(17, thread="Dummy-1")]

    def program(rank: int) -> list[Step]:
        chosen = random.Random(2 * seed + rank)
        return [step for _ in range(6) for step in (all_reduce(21), chosen.choice(ways))]

    assert diagnose(play(2, program)) == []


@pytest.mark.parametrize(
    ("phase", "code", "kinds"),
    [
        (Phase.FINISHED, None, []),
        (Phase.FINISHED, 0, []),
        (Phase.EXITED, 0, []),
        (Phase.EXITED, 7, [Kind.RANK_EXITED]),
        (Phase.EXITED, None, [Kind.RANK_EXITED]),
        (Phase.RAISED, None, [Kind.RANK_RAISED]),
        (Phase.KILLED, -9, [Kind.RANK_EXITED]),
    ],
)
def test_a_rank_that_ended_with_an_error_is_named_though_the_others_finished(
    phase: Phase, code: int | None, kinds: list[Kind]
) -> None:
    """The short way out of a diagnosis is for ranks that ended without an error, and for no others."""
    ranks = {0: RankState(0, phase, exit_code=code), 1: RankState(1, Phase.FINISHED, exit_code=0)}
    assert [d.kind for d in diagnose(Evidence(2, ranks=ranks))] == kinds
