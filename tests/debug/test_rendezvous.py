"""Ranks that wait in init_process_group at addresses where they can not meet."""

from __future__ import annotations

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import CallWait, Evidence, Phase, State
from distsim.debug.records.kinds import Kind
from tests.debug.builders import all_reduce, play


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


def test_different_addresses_are_nothing_at_first() -> None:
    """Processes start one after the other."""
    assert diagnose(meeting({0: "a:1", 1: "a:2"}, 1.0)) == []
