"""Ranks that wait in init_process_group at addresses where they can not meet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.diagnosis.waits import rendezvous
from distsim.debug.records import CallWait, Evidence, Phase, State
from distsim.debug.records.kinds import Kind, Proof
from tests.debug.builders import all_reduce, barrier, finish, play, world
from tests.debug.test_case_rules import case_of


def meeting(addresses: dict[int, str], waited_s: float, size: int = 3, reached: bool = True) -> Evidence:
    """Each rank waits in init_process_group at an address of its own; the others have not come to it."""
    evidence = play(size, lambda rank: [all_reduce(5)], hang_after_s=60.0)
    evidence.records = {rank: list(calls) for rank, calls in evidence.records.items()}
    for rank, state in evidence.ranks.items():
        (call,) = evidence.records[rank]
        call.op, call.state, call.completed_s, call.issued_s = "init_process_group", State.ISSUED, None, 1.0
        if rank in addresses:
            state.phase, state.waits, state.since_s = Phase.BLOCKED, (CallWait(call),), 1.0
            state.meets_at, state.reached_store = addresses[rank], reached
        else:
            evidence.records[rank] = []
            state.phase, state.joining = Phase.RUNNING, True
    evidence.now_s = 1.0 + waited_s
    return evidence


@pytest.mark.parametrize(
    ("addresses", "culprits"),
    [
        ({0: "a:1", 1: "a:1", 2: "a:8"}, (2,)),
        ({0: "a:8", 1: "a:1", 2: "a:1"}, (0,)),
        ({0: "a:1", 1: "a:2", 2: "a:3"}, (1, 2)),
    ],
)
def test_who_calls_another_address_is_named(addresses: dict[int, str], culprits: tuple[int, ...]) -> None:
    """Not rank 0, which waits at its own; a warning first, a hang when the others have waited long enough."""
    (warning,) = diagnose(meeting(addresses, 5.0))
    assert (warning.kind, warning.culprits, warning.provisional) == (Kind.NEVER_JOINED, culprits, True)
    (hang,) = diagnose(meeting(addresses, 61.0))
    assert (hang.kind, hang.culprits, hang.exit_code, hang.ends_job) == (Kind.NEVER_JOINED, culprits, 3, True)
    assert all(address in hang.explanation for address in addresses.values())
    assert "MASTER_PORT" in hang.suggestion


def test_a_store_that_no_process_serves_is_named() -> None:
    """All ranks are there, and none has reached the address."""
    (hang,) = diagnose(meeting(dict.fromkeys(range(3), "nowhere:1"), 61.0, reached=False))
    assert (hang.kind, hang.culprits, hang.ends_job) == (Kind.NEVER_JOINED, (0, 1, 2), True)
    assert "nowhere:1" in hang.explanation


def test_who_has_not_reached_the_store_is_named() -> None:
    """127.0.0.1 means another host on each: rank 2 looks for the store on its own."""
    evidence = meeting(dict.fromkeys(range(3), "127.0.0.1:1"), 61.0)
    evidence.ranks[2].reached_store = False
    (hang,) = diagnose(evidence)
    assert (hang.kind, hang.culprits, hang.victims) == (Kind.NEVER_JOINED, (2,), (0, 1))


@pytest.mark.parametrize(
    ("addresses", "size", "reached"),
    [
        ({1: "a:1", 2: "a:1"}, 3, False),  # rank 0 has not come yet
        (dict.fromkeys(range(3), "a:1"), 3, True),  # they exchange their addresses
    ],
)
def test_ranks_at_one_address_may_still_meet(addresses: dict[int, str], size: int, reached: bool) -> None:
    """Nothing is said of where they meet."""
    assert not [d for d in diagnose(meeting(addresses, 5.0, size, reached)) if "MASTER_ADDR" in d.suggestion]


@pytest.mark.parametrize(("there", "size"), [((0, 1, 2), 6), ((0, 1), 3), ((0,), 3), ((0, 1, 2), 3)])
def test_rank_0_that_serves_the_store_has_reached_it(there: tuple[int, ...], size: int) -> None:
    """Its TCPStore() returns only when all have come: it waits for the others, and its address is right."""
    evidence = meeting(dict.fromkeys(there, "127.0.0.1:1"), 61.0, size)
    evidence.ranks[0].reached_store = False
    assert not [d for d in diagnose(evidence) if 0 in d.culprits and "not reached" in d.explanation]


def test_two_processes_of_one_number_are_named() -> None:
    """Rank 1 is missing because two processes are rank 0: that, and what to do, is the verdict."""
    evidence = meeting({0: "a:1", 2: "a:1"}, 61.0)
    evidence.doubles = ["two processes call themselves rank 0 of 3 at a:1 (pid 5 on h, pid 6 on h): give each its own"]
    (hang,) = diagnose(evidence)
    assert (hang.kind, hang.culprits, hang.victims) == (Kind.NEVER_JOINED, (1,), (0, 2))
    assert hang.explanation == (
        "No process is rank 1, which has never joined: two processes call themselves rank 0 of 3 at a:1 (pid 5 on h, "
        "pid 6 on h)."
    )
    assert hang.suggestion == "Give each its own."


def test_a_rank_that_two_processes_are_waits_twice() -> None:
    """Not as a rank behind the last one of the world, which nobody has started."""
    evidence = meeting({0: "a:1", 1: "a:1", 3: "a:1"}, 61.0, size=4)
    for rank, calls in evidence.records.items():
        for call in calls:
            call.group = world(3)
        evidence.ranks[rank].pid = 100 + rank
    evidence.world_size = 4
    evidence.doubles = [
        "two processes call themselves rank 1 of 3 at a:1 (pid 101 on h, pid 103 on h): give each its own"
    ]
    evidence.double_ranks = {1: 1, 3: 1}
    (hang,) = diagnose(evidence)
    assert (hang.culprits, hang.victims, sorted(hang.stuck), 3 in hang.sites) == ((2,), (0, 1), [0, 1], False)
    assert hang.explanation.endswith("(pid 101 on h, pid 103 on h). Rank 1 waits twice, also as pid 103.")


def test_different_addresses_are_nothing_at_first() -> None:
    """Processes start one after the other."""
    assert diagnose(meeting({0: "a:1", 1: "a:2"}, 1.0)) == []


@pytest.mark.parametrize(("waited_s", "kinds"), [(5.0, []), (61.0, [Kind.NEVER_JOINED])])
def test_a_second_meeting_in_one_store_that_never_ends_is_a_hang(waited_s: float, kinds: list[Kind]) -> None:
    """All ranks are in init_process_group: gloo waits for the addresses of the group that is gone."""
    evidence = meeting(dict.fromkeys(range(3), "a:1"), waited_s)
    for state in evidence.ranks.values():
        state.reused_store = "a:1"
    found = diagnose(evidence)
    assert [d.kind for d in found] == kinds
    assert all((d.culprits, d.exit_code, "PrefixStore" in d.suggestion) == ((0, 1, 2), 3, True) for d in found)


def test_who_loses_the_others_in_a_second_meeting_is_no_culprit() -> None:
    """Rank 2 connected, to an address that is gone, and raised; the same verdict as where it hangs."""
    evidence = meeting(dict.fromkeys(range(3), "a:1"), 0.5)
    for state in evidence.ranks.values():
        state.reused_store = "a:1"
    lost = evidence.ranks[2]
    lost.phase, lost.waits, lost.exit_code = Phase.RAISED, (), 1
    lost.exception = "RuntimeError: Connection closed by peer [127.0.0.1]:18305"
    found = diagnose(evidence)
    assert [(d.kind, d.culprits, d.victims) for d in found] == [(Kind.NEVER_JOINED, (0, 1), (2,))]
    for state in evidence.ranks.values():
        state.reused_store = None
    assert [d.kind for d in diagnose(evidence)] != [Kind.NEVER_JOINED], "in a store of its own it is rank 2's"


@pytest.mark.parametrize("sees_it", [0, 1])
def test_a_file_that_an_earlier_run_left_is_named(sees_it: int) -> None:
    """Only the first rank that looks finds the file old; where another one does, the keys in it may be this job's."""
    evidence = meeting(dict.fromkeys(range(3), "a:1"), 0.5)
    for rank, state in evidence.ranks.items():
        evidence.records[rank][0].issued_s = 1.0 + rank / 10
        state.phase, state.waits, state.exit_code = Phase.RAISED, (), 1
        state.exception = "RuntimeError: Gloo connectFullMesh failed with ... Connection refused"
    evidence.ranks[sees_it].reused_store = "/shared/store"
    found = diagnose(evidence)
    assert any("Delete /shared/store" in d.suggestion for d in found) is (sees_it == 0)
    if sees_it == 0:
        assert [(d.kind, d.culprits, d.exit_code) for d in found] == [(Kind.NEVER_JOINED, (0, 1, 2), 3)]


def test_nobody_else_is_accused_where_two_processes_are_one_rank() -> None:
    """Process 2 calls itself rank 0 as well, and waits in a call that ranks 0 and 1 have made by themselves."""
    evidence = play(3, lambda rank: [all_reduce(4), barrier(5) if rank == 2 else finish()])
    assert [d.kind for d in diagnose(evidence)] == [Kind.EXTRA_COLLECTIVE]
    evidence.doubles = ["two processes call themselves rank 0 of 2 at a:1 (pid 5 on h, pid 6 on h): give each its own"]
    evidence.double_ranks = {0: 0, 2: 0}
    (hang,) = diagnose(evidence)
    assert (hang.kind, hang.culprits, hang.victims, list(hang.stuck)) == (Kind.NEVER_JOINED, (0,), (), [0])
    assert hang.explanation.startswith("Two processes call themselves rank 0 of 2")
    assert hang.suggestion.startswith("Give each its own")


def test_the_address_at_which_the_others_wait_is_said() -> None:
    """A rank that is elsewhere may be looked for by it: another launcher may have given it another address."""
    evidence = meeting({0: "a:1", 1: "a:1"}, 61.0)
    evidence.ranks[2].phase = Phase.ABSENT
    (hang,) = diagnose(evidence)
    assert (hang.kind, hang.culprits) == (Kind.NEVER_JOINED, (2,))
    assert hang.explanation.endswith("The store of their rendezvous is at a:1.")


@pytest.mark.parametrize(
    ("addresses", "setting"),
    [({0: "a:1", 1: "a:2"}, "port (MASTER_PORT"), ({0: "a:1", 1: "b:1"}, "address (MASTER_ADDR"),
     ({0: "a:1", 1: "b:2"}, "address (MASTER_ADDR")],
)  # fmt: skip
def test_the_setting_that_differs(addresses: dict[int, str], setting: str) -> None:
    """Of addresses with one host the port, else the host."""
    (hang,) = diagnose(meeting(addresses, 61.0, size=2))
    assert f"Give every rank the same {setting}" in hang.suggestion


@pytest.mark.parametrize(("index", "state", "connected"), [
    (1, State.COMPLETED, True), (0, State.COMPLETED, False), (1, State.ISSUED, False), (1, State.FAILED, False),
])  # fmt: skip
def test_a_group_that_has_connected(index: int, state: State, connected: bool) -> None:
    """A later call on it has ended well."""
    evidence = meeting({0: "a:1", 1: "a:1"}, 5.0, size=2)
    init = evidence.records[0][0]
    evidence.records = {**evidence.records, 0: [init, replace(init, op="barrier", state=state, index=index)]}
    assert rendezvous._has_connected(case_of(evidence), init) is connected


@pytest.mark.parametrize(("waited_s", "connected", "in_file", "expected"), [
    ((61.0, 61.0), False, False, True),
    ((61.0, 59.0), False, False, False),
    ((61.0, 61.0), True, False, False),
    ((61.0, 61.0), False, True, True),
])  # fmt: skip
def test_a_second_meeting_has_waited_when_all_have(
    waited_s: tuple[float, float], connected: bool, in_file: bool, expected: bool
) -> None:
    """As long as the limit, and none of them has made a call since."""
    evidence = meeting({0: "a:1", 1: "a:1"}, 0.0, size=2)
    evidence.now_s = 100.0
    for rank, state in evidence.ranks.items():
        state.reused_store = "/shared/store" if in_file else "a:1"
        evidence.records[rank][0].issued_s = 100.0 - waited_s[rank]
    if connected:
        init = evidence.records[1][0]
        evidence.records = {**evidence.records, 1: [init, replace(init, op="barrier", state=State.COMPLETED, index=1)]}
    found = rendezvous.stale_addresses(case_of(evidence))
    assert [(d.culprits, d.victims, d.proof) for d in found] == [((0, 1), (), Proof.PATIENCE)] * expected
    assert all(("/shared/store was written before" in d.explanation) is in_file for d in found)
    assert all(
        ("the store at a:1 still holds the addresses of the process" in d.explanation) is not in_file for d in found
    )


def test_ranks_have_waited_to_meet_when_all_have() -> None:
    """The last one that came to its address counts, as the others may have been told it late."""
    evidence = meeting({0: "a:1", 1: "a:8"}, 99.0, size=2)
    evidence.records[1][0].issued_s = 99.0
    assert rendezvous.apart(case_of(evidence)) == []
    evidence.records[1][0].issued_s = 95.0
    assert [d.proof for d in rendezvous.apart(case_of(evidence))] == [Proof.NOT_YET]
